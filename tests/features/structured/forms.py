"""Random forms of answers, and judges of answers that this project did not write."""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
from hypothesis import strategies as st

from vllm_blend import StructuredOutputsParams

NAMES = st.text("abcxyz_é", min_size=1, max_size=4)
SHORT = st.integers(0, 3)


@dataclass(frozen=True)
class Form:
    """A form, as a request asks for it."""

    params: StructuredOutputsParams

    def judge(self, text: str) -> None:
        """Assert that a complete answer has the form."""
        form = self.params
        if form.regex is not None:
            assert re.fullmatch(form.regex, text), (form.regex, text)
        elif form.choice is not None:
            assert text in form.choice
        else:
            assert isinstance(form.json, dict)
            value = json.loads(text)
            jsonschema_rs.validator_for(form.json).validate(value)


def _ranges(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda pair: (min(pair), max(pair)))


def _leaves() -> st.SearchStrategy[dict[str, Any]]:
    numbers = _ranges(-2000, 2000)
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, "é"]}}]),
        numbers.map(lambda span: {"type": "integer", "minimum": span[0], "maximum": span[1]}),
        _ranges(0, 5).map(lambda span: {"type": "string", "minLength": span[0], "maxLength": span[1]}),
        st.lists(st.one_of(NAMES, st.integers(-9, 9), st.none()), min_size=1, max_size=3, unique_by=repr).map(
            lambda values: {"enum": values}
        ),
        st.sampled_from(["^[a-c]{2,4}$", "^x", "z$"]).map(lambda p: {"type": "string", "pattern": p, "maxLength": 6}),
        st.just({"type": "string", "format": "date"}),
    )


def _inner(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def an_object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
        required = sorted(properties)[optional:]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def an_array(items: dict[str, Any], span: tuple[int, int]) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": span[0], "maxItems": span[1]}

    return st.one_of(
        st.builds(an_object, st.dictionaries(NAMES, children, max_size=3), SHORT),
        st.builds(an_array, children, _ranges(0, 2)),
        st.lists(children, min_size=1, max_size=2).map(lambda several: {"anyOf": several}),
    )


SCHEMAS = st.recursive(_leaves(), _inner, max_leaves=4)

_ATOMS = st.one_of(
    st.text(string.ascii_lowercase + "é日 ", min_size=1, max_size=3).map(re.escape),
    # No \d: it has the digits of a version of Unicode, which need not be that of the Python that judges.
    st.sampled_from(["[0-9]", "[a-f]", "[^a-z]", ".", r"\.", "(?:ab|ac)", "[😀-😃]"]),
)
REGEXES = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda several: f"(?:{'|'.join(several)})"),
        st.builds(lambda part, span: f"(?:{part}){{{span[0]},{span[1]}}}", inner, _ranges(0, 3)),
    ),
    max_leaves=5,
)
CHOICES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=4)

FORMS = st.one_of(
    SCHEMAS.map(lambda schema: Form(StructuredOutputsParams(json=schema, disable_any_whitespace=True))),
    REGEXES.map(lambda regex: Form(StructuredOutputsParams(regex=regex))),
    CHOICES.map(lambda choice: Form(StructuredOutputsParams(choice=choice))),
)
