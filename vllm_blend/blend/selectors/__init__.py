"""Selectors choose the context tokens that a blend recomputes: one file per selector, and one registry of all.

To add one, copy `first_tokens.py` (it looks at positions alone), `value_deviation.py` (at K and V of a layer) or
`question_attention.py` (at the question's attention), and add the class to the tuple below. In a program of your own,
decorate the class with `register_selector` instead. `blend_selector` then takes its name.
"""

from __future__ import annotations

from vllm_blend.blend.selectors.base import Evidence, Look, LooksAt, Selector, choose, top_indices
from vllm_blend.blend.selectors.first_tokens import FirstTokens
from vllm_blend.blend.selectors.full import Full
from vllm_blend.blend.selectors.no_recompute import NoRecompute
from vllm_blend.blend.selectors.question_attention import QuestionAttention
from vllm_blend.blend.selectors.random import RandomTokens
from vllm_blend.blend.selectors.spec import parse_selector
from vllm_blend.blend.selectors.value_deviation import ValueDeviation
from vllm_blend.registry import Registry

AUTO = "auto"
BEST = QuestionAttention.name  # what "auto" stands for, for every model: docs/selection.md says why
SELECTORS: Registry[type[Selector]] = Registry(
    "selector",
    "blend_selector",
    (ValueDeviation, QuestionAttention, FirstTokens, RandomTokens, NoRecompute, Full),
    aliases={AUTO: BEST},
)
register_selector = SELECTORS.register  # as a decorator, it makes a class of your own usable by its `name`


def make_selector(name: str) -> Selector:
    """Return the selector registered as `name`, perhaps with settings in parentheses. "auto" is `BEST`, and is reported
    by that name.

    Raises ValueError that lists the known selectors.
    """
    if not isinstance(name, str):  # it may come from a prompt, whose types are not checked
        raise ValueError(f"blend_selector={name!r} must be text: the name of a rule, such as {BEST!r}")
    return parse_selector(name, SELECTORS)


__all__ = [
    "AUTO",
    "BEST",
    "SELECTORS",
    "Evidence",
    "Look",
    "LooksAt",
    "Selector",
    "choose",
    "make_selector",
    "register_selector",
    "top_indices",
]
