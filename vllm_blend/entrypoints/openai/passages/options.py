"""The field `blend` of a request: whether and how its passages are reused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from vllm_blend.blend.selectors import make_selector
from vllm_blend.checks import a_type, check_ratio, closest, is_number
from vllm_blend.chunk_options import parse_continues, parse_relevance
from vllm_blend.inputs import ParsedPrompt

Mode = Literal["off", "reuse", "blend"]
Order = Literal["given", "free"]

_XARGS_PREFIX = "blend_"
T = TypeVar("T")


@dataclass(frozen=True)
class BlendOptions:
    """How the passages of a request are used.

    With the mode "off" the prompt is computed as if it had none. "reuse" takes their stored KV as it is. "blend", the
    default, computes some of their tokens again: a share `ratio` that `selector` chooses, or what the engine is set to.
    `continues` has, for each passage that the request names, the number of an earlier one that it continues on its
    page, or None. With the `order` "free" the chunks of a completion are put into the order of their `relevance`: a
    score for each (larger is more relevant), or several lists of them.
    """

    mode: Mode | None = None
    ratio: float | None = None
    selector: str | None = None
    relevance: Any = None
    continues: Any = None
    order: Order = "given"

    @property
    def is_off(self) -> bool:
        return self.mode == "off"

    def check(self, blends: bool) -> None:
        """Raise ValueError if the request asks for what an engine that does not blend cannot do."""
        asked = [name for name in ("ratio", "selector") if getattr(self, name) is not None]
        asked += ["mode"] if self.mode in ("reuse", "blend") else []
        if asked and not blends:
            raise ValueError(
                f"blend.{asked[0]}={getattr(self, asked[0])!r}, but this server does not blend: start it with "
                "--enable-blending, or leave the field out"
            )

    def settings(self, parsed: ParsedPrompt) -> dict[str, Any]:
        """Return the fields of a ParsedPrompt that these options set, for one that has chunks."""
        selector = "none" if self.mode == "reuse" else self.selector
        given = {"blend_selector": selector, "blend_recompute_ratio": self.ratio}
        return {name: value for name, value in given.items() if value is not None} if parsed.chunk_bounds else {}


def parse_blend(blend: Any, vllm_xargs: Any = None) -> BlendOptions:
    """Return the options in a request's `blend` field (None: all defaults), or in its `vllm_xargs`, which may hold the
    same object as "blend", or its fields as "blend_mode", "blend_ratio" and so on.

    Raises TypeError or ValueError that names the field.
    """
    given, name = dict(_as_object(blend, "blend")), "blend"
    for key, value in _as_object(vllm_xargs, "vllm_xargs").items():
        if key != "blend" and not (isinstance(key, str) and key.startswith(_XARGS_PREFIX)):
            continue  # another part of the server may read it
        name = "vllm_xargs.blend"
        own = _as_object(value, name) if key == "blend" else {key.removeprefix(_XARGS_PREFIX): value}
        for field, setting in own.items():
            if given.setdefault(field, setting) != setting:
                raise ValueError(f"{name}.{field}={setting!r}, but blend.{field}={given[field]!r}: give one of them")
    return _checked(given, name)


def parse_scores(relevance: Any, num_passages: int, what: str) -> tuple[tuple[float, ...], ...]:
    """Return the scores of `blend.relevance` by signal, each with one for every passage. Raises TypeError or ValueError
    that names the field; `what` says which passages are meant."""
    return _of_passages(parse_relevance, "relevance", relevance, num_passages, what)


def parse_pages(continues: Any, num_passages: int, what: str) -> tuple[int | None, ...]:
    """Return the passage that each continues by `blend.continues`, or None. Raises as `parse_scores` does."""
    return _of_passages(parse_continues, "continues", continues, num_passages, what)


def _of_passages(
    parse: Callable[[Any, int], tuple[T, ...]], field: str, given: Any, num_passages: int, what: str
) -> tuple[T, ...]:
    if given is None:
        return ()
    if num_passages == 0:
        raise ValueError(
            f"blend.{field} is given, but the request names no passages: give {what}, or leave blend.{field} out"
        )
    try:
        return parse(given, num_passages)
    except (TypeError, ValueError) as error:
        raise type(error)(f"blend.{error} (the passages are {what})") from error


def _checked(given: dict[str, Any], name: str) -> BlendOptions:
    known = [field.name for field in fields(BlendOptions)]
    for field in given:
        if field not in known:
            meant = closest(field, known)
            hint = f"did you mean {meant!r}?" if meant else f"the fields are {', '.join(known)}"
            raise ValueError(f"{name}.{field} is unknown: {hint}")
    mode, ratio, selector = given.get("mode"), given.get("ratio"), given.get("selector")
    if mode not in (None, "off", "reuse", "blend"):
        raise ValueError(f"{name}.mode={mode!r} is unknown: use 'off', 'reuse' or 'blend'")
    order: Any = "given" if given.get("order") is None else given["order"]
    if order not in ("given", "free"):
        raise ValueError(f"{name}.order={order!r} is unknown: use 'given', or 'free' if passages may change places")
    if ratio is not None:
        if not is_number(ratio):
            raise TypeError(f"{name}.ratio is {ratio!r}: give a number from 0 to 1")
        check_ratio(f"{name}.ratio", ratio)
    if selector is not None:
        if not isinstance(selector, str):
            raise TypeError(f"{name}.selector is {selector!r}: give the name of a rule, such as 'auto'")
        try:
            make_selector(selector)
        except ValueError as error:
            raise ValueError(f"{name}.selector: {error}") from error
    if mode in ("off", "reuse") and (ratio is not None or selector is not None):
        asked = "ratio" if ratio is not None else "selector"
        raise ValueError(f"{name}.{asked} is for the mode 'blend', but {name}.mode={mode!r}: leave one of them out")
    return BlendOptions(mode, ratio, selector, given.get("relevance"), given.get("continues"), order)


def _as_object(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {a_type(value)}: give an object, such as {{'mode': 'blend'}}")
    return value
