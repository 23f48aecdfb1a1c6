"""What a request may ask of the form of its answer, under vLLM's names."""

from __future__ import annotations

import json as json_library
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from vllm_blend.checks import a_type, require

FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SWITCHES = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


@dataclass
class StructuredOutputsParams:
    """The form of an answer, whatever the model says: give exactly one of the first six fields.

    json: a JSON schema, as a dict or as text.
    regex: a regular expression that the whole answer matches (syntax of Rust's regex crate, so no look-around and no
        back-references).
    choice: the answer is one of these strings.
    grammar: a context-free grammar in the Lark variant of llguidance, or in GBNF, whose first rule is `root`.
    json_object: True: any JSON object.
    structural_tag: free text in which tags have a form: JSON text, or a dict, of {"structures": [{"begin", "schema",
        "end"}], "triggers": [...]}.
    disable_any_whitespace: no whitespace between the parts of JSON.
    disable_additional_properties: objects of a schema have the properties that it names only, unless it says otherwise.
    whitespace_pattern: a regular expression of the whitespace between the parts of JSON.
    disable_fallback: accepted for vLLM's sake; there is one library, and nothing to fall back on.

    Raises ValueError or TypeError naming the field. The engine refuses what cannot be compiled when a request comes.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        given = self._given()
        forms = ", ".join(FORMS)
        require(bool(given), f"structured_outputs says nothing of the form: give one of {forms}, or leave it out")
        require(len(given) == 1, f"structured_outputs has {' and '.join(given)}: give exactly one of {forms}")
        for name in ("json", "structural_tag"):
            _check_type(name, getattr(self, name), (str, dict), "a dict, or JSON text")
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_type(name, getattr(self, name), (str,), "a string")
        for name in ("json_object", *_SWITCHES):
            _check_type(name, getattr(self, name), (bool,), "True or False")
        if self.choice is not None:
            self.choice = _strings(self.choice)
        require(
            not (self.disable_any_whitespace and self.whitespace_pattern is not None),
            "structured_outputs has disable_any_whitespace and whitespace_pattern: give one of them",
        )

    @property
    def form(self) -> str:
        """Return the name of the field that gives the form."""
        return self._given()[0]

    def _given(self) -> list[str]:
        asks_nothing = {"json_object"} if self.json_object is False else set()
        return [name for name in FORMS if getattr(self, name) is not None and name not in asks_nothing]

    def all_constraints_none(self) -> bool:
        """Return False: there is no such object without a form. vLLM has this method."""
        return False


@dataclass
class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's earlier name of `StructuredOutputsParams`, for `SamplingParams(guided_decoding=...)`.

    `backend` may be None, "auto" or "guidance".
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.backend in (None, "auto", "guidance"),
            f"guided_decoding: backend={self.backend!r} does not exist here: use 'guidance', or leave it out",
        )

    def as_structured_outputs(self) -> StructuredOutputsParams:
        """Return the same form under the new name."""
        names = [field.name for field in fields(StructuredOutputsParams)]
        return StructuredOutputsParams(**{name: getattr(self, name) for name in names})


def parse_structured_outputs(value: Any, guided_decoding: Any = None) -> StructuredOutputsParams | None:
    """Return what the parameters `structured_outputs` and `guided_decoding` of a request ask for. Both may be dicts of
    the fields. Raises ValueError or TypeError."""
    if guided_decoding is not None:
        require(value is None, "structured_outputs and guided_decoding are both given: keep structured_outputs")
        old = _made(GuidedDecodingParams, "guided_decoding", guided_decoding)
        return old.as_structured_outputs() if isinstance(old, GuidedDecodingParams) else old
    return None if value is None else _made(StructuredOutputsParams, "structured_outputs", value)


def parse_json(name: str, text: str | dict[str, Any]) -> Any:
    """Return the value that a field's JSON text has. Raises ValueError naming the field."""
    try:
        # A dict goes through text, too: it must be JSON, and later changes to it must not matter.
        return json_library.loads(json_library.dumps(text, allow_nan=False) if isinstance(text, dict) else text)
    except RecursionError:
        raise ValueError(f"structured_outputs.{name} is nested too deeply: flatten it, or use $ref") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"structured_outputs.{name} is no valid JSON: {error}") from None


def _made(kind: type[StructuredOutputsParams], name: str, value: Any) -> StructuredOutputsParams:
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {a_type(value)}: give {kind.__name__}")
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(map(str, value)) - set(known))
    require(not unknown, f"{name} has no field {', '.join(map(repr, unknown))}: use {', '.join(known)}")
    return kind(**value)


def _check_type(name: str, value: Any, kinds: tuple[type, ...], what: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise TypeError(f"structured_outputs.{name} must be {what}, not {type(value).__name__}")


def _strings(choice: Any) -> list[str]:
    if isinstance(choice, (str, bytes)) or not hasattr(choice, "__iter__"):
        raise TypeError(f"structured_outputs.choice must be a list of strings, not {type(choice).__name__}")
    items = list(_each_string(choice))
    require(bool(items), "structured_outputs.choice is empty: list at least one string")
    return items


def _each_string(choice: Any) -> Iterator[str]:
    for index, item in enumerate(choice):
        if not isinstance(item, str):
            raise TypeError(f"structured_outputs.choice[{index}] must be a string, not {type(item).__name__}")
        yield item
