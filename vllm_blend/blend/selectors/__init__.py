"""Which context tokens are computed again: one file per rule, one registry of all."""

from __future__ import annotations

from vllm_blend.blend.selectors.attention_deviation import AttentionDeviation
from vllm_blend.blend.selectors.base import Evidence, Look, LooksAt, Selector, best, choose
from vllm_blend.blend.selectors.first_tokens import FirstTokens
from vllm_blend.blend.selectors.gradual import Gradual
from vllm_blend.blend.selectors.key_deviation import KeyDeviation
from vllm_blend.blend.selectors.late_attention import LateAttention
from vllm_blend.blend.selectors.question_attention import QuestionAttention
from vllm_blend.blend.selectors.simple import Full, NoRecompute, Random
from vllm_blend.blend.selectors.spec import AUTO, parse_selector
from vllm_blend.blend.selectors.value_deviation import ValueDeviation
from vllm_blend.registry import enter

SELECTORS: dict[str, type[Selector]] = {}
# What "auto" stands for, for every model: docs/selection.md says why. Levers are for chunks that are stored whole.
BEST, BEST_COMPRESSED = "late_attention+mean_shift", "question_attention"


def register_selector(selector: type[Selector]) -> type[Selector]:
    """Make a selector usable by its `name`. Works as a decorator on a user's own class. Raises ValueError where the
    name is taken."""
    if getattr(selector, "name", None) == AUTO:
        raise ValueError(f"{selector.__name__} cannot be named {AUTO!r}: that stands for {BEST!r}; choose another name")
    return enter(SELECTORS, "selector", selector)


def make_selector(name: str, compressed: bool = False) -> Selector:
    """The selector registered as `name`, or what `spec.py` makes of it: a registered one with settings and levers.
    "auto" is `BEST`, or `BEST_COMPRESSED` where chunks are stored compressed, and goes by that name in what the engine
    reports. Raises ValueError listing the known ones."""
    if not isinstance(name, str):  # of a prompt, whose types nobody has checked
        raise ValueError(f"blend_selector={name!r} must be text: the name of a rule, such as {AUTO!r} or {BEST!r}")
    name = name.strip()
    if name == AUTO:
        name = BEST_COMPRESSED if compressed else BEST
    return SELECTORS[name]() if name in SELECTORS else parse_selector(name, SELECTORS)


for _selector in (
    ValueDeviation,
    KeyDeviation,
    Gradual,
    QuestionAttention,
    LateAttention,
    AttentionDeviation,
    FirstTokens,
    Random,
    NoRecompute,
    Full,
):
    register_selector(_selector)

__all__ = [
    "AUTO",
    "BEST",
    "BEST_COMPRESSED",
    "SELECTORS",
    "Evidence",
    "Look",
    "LooksAt",
    "Selector",
    "best",
    "choose",
    "make_selector",
    "register_selector",
]
