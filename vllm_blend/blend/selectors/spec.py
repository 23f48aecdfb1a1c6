"""Parse a selector from text, as options and prompts give it: a rule with its settings, and levers on its choice.

question_attention
question_attention(layer_share=0.5, over_heads=max)
question_attention(first_round=0.5) + smoothing(window=5) + coverage(share=0.7)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch

from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.selectors.base import Evidence, Look, Selector
from vllm_blend.blend.selectors.levers import LEVERS, Lever
from vllm_blend.blend.selectors.levers.mean_shift import MeanShift
from vllm_blend.registry import Registry

AUTO = "auto"  # always alone: it has levers of its own
MAX_CHARACTERS = 1024  # of a selector's text; one rule and all levers, with all of their settings, take less than half
_MARKS = re.compile(r"([+()])")
_PART = re.compile(r"\s*([\w.-]+)\s*(?:\((.*)\))?\s*")


@dataclass(frozen=True)
class Composed(Selector):
    """A selector with levers, applied in their order. Its name is its text."""

    text: str
    rule: Selector
    levers: tuple[Lever, ...]

    def __post_init__(self) -> None:
        own = {
            "name": self.text,
            "looks_at": self.rule.looks_at,
            "default_ratio": self.rule.default_ratio,
            "chooses_passages": self.rule.chooses_passages,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def choose_spans(
        self, passages: PromptPassages, cost: Callable[[Span], int], budget: int
    ) -> Sequence[Span] | np.ndarray | None:
        return self.rule.choose_spans(passages, cost, budget)

    def score(self, evidence: Evidence) -> torch.Tensor:
        scores = self.rule.score(evidence)
        for lever in self.levers:
            scores = lever.apply(scores, evidence)
        return scores

    def count(self, scores: torch.Tensor, evidence: Evidence, budget: int) -> int:
        own = self.rule.count(scores, evidence, budget)  # a user's own rule may do what levers do
        return min([own, *(lever.count(evidence, budget) for lever in self.levers)])

    def mean_shift(self) -> float:
        return max([self.rule.mean_shift(), *(lever.mean_shift() for lever in self.levers)])

    def passed_over_scale(self) -> float:
        return self.rule.passed_over_scale()

    def look(self, num_layers: int) -> Look:
        return self.rule.look(num_layers)

    def first_share(self) -> float:
        return self.rule.first_share()

    def shares(self, ratio: float, check_layers: Sequence[int]) -> list[float]:
        return self.rule.shares(ratio, check_layers)


def parse_selector(text: str, selectors: Registry[type[Selector]]) -> Selector:
    """Return the selector that `text` describes. Raises ValueError that names the wrong part and the known ones."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(
            f"blend_selector={text[:40] + '...'!r} has {len(text)} characters: give a rule and levers, each once, in "
            f"at most {MAX_CHARACTERS} characters"
        )
    first, *others = _parts(text)
    rule: Selector = _make(first, selectors, text)
    levers = [_make(part, LEVERS, text) for part in others]
    if not levers:
        return rule
    names = [lever.name for lever in levers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"blend_selector={text!r}: the lever {twice!r} is given more than once: give it once")
    if rule.fixed_ratio is not None:
        raise ValueError(f"blend_selector={text!r}: {rule.name!r} leaves nothing to choose: leave the levers out")
    if not rule.looks_at.asks and any(lever.name == "coverage" for lever in levers):
        raise ValueError(
            f"blend_selector={text!r}: coverage measures the question's attention, which {rule.name!r} does not look "
            "at: use question_attention, or leave coverage out"
        )
    changing = next((lever.name for lever in levers if not isinstance(lever, MeanShift)), None)
    if rule.chooses_passages and changing is not None:
        raise ValueError(
            f"blend_selector={text!r}: {rule.name!r} chooses spans such as sentences, not tokens by their scores, "
            f"which {changing} changes: leave {changing} out"
        )
    return Composed(text, rule, tuple(levers))


def _parts(text: str) -> list[str]:
    """Return the terms of a sum. A plus sign within parentheses belongs to its term."""
    parts, depth = [""], 0
    for piece in _MARKS.split(text):
        if piece == "+" and depth == 0:
            parts.append("")
        else:
            depth = {"(": 1, ")": 0}.get(piece, depth)
            parts[-1] += piece
    return parts


def _make(part: str, known: Registry[Any], text: str) -> Any:
    found = _PART.fullmatch(part)
    name = part.strip() if found is None else found[1]
    if found is None or name not in known:
        if known is LEVERS:
            raise ValueError(f"blend_selector={text!r}: the lever {name!r} is unknown: {known.advice(name)}")
        if name == AUTO:
            raise ValueError(f"blend_selector={text!r}: {AUTO!r} has levers of its own: give it alone, or name a rule")
        raise ValueError(f"blend_selector={text!r} is unknown: {known.advice(name)}")
    if not (found[2] or "").strip():
        return known[name]()
    try:
        return known[name](**_arguments(found[2], known[name]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"blend_selector={text!r}: {error}") from error


def _arguments(text: str, kind: type[Any]) -> dict[str, Any]:
    """Parse `name=value, ...` into numbers and words."""
    defaults = {field.name: field.default for field in fields(kind)} if is_dataclass(kind) else {}
    arguments: dict[str, Any] = {}
    for pair in text.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or name not in defaults or name in arguments:
            raise ValueError(
                f"{pair.strip()!r} is not a setting of {kind.name!r}: write name=value, each name once, out of "
                f"{[*defaults]}"
            )
        arguments[name] = _value(name, value, defaults[name])
    return arguments


def _value(name: str, text: str, default: Any) -> int | float | str:
    """Parse a value of the same type as the setting's default. Raises ValueError for another type; the range is checked
    by the class."""
    value: int | float | str = text
    for kind in (int, float):
        try:
            value = kind(text)
            break
        except ValueError:
            continue
    number = isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < 2**63
    if isinstance(default, int) and not isinstance(default, bool) and not (number and isinstance(value, int)):
        raise ValueError(f"{name}={text} must be a whole number, such as {default}")
    if isinstance(default, float) and not number:
        raise ValueError(f"{name}={text} must be a number, such as {default}")
    return value
