"""What is compared: rules at ratios, with chunks that were encoded in a company. The defaults are the tuples here.

Company is what stood before a chunk when it was encoded, a name of `blend/encoding_contexts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_blend.blend.encoding_contexts import check_encoding_context
from vllm_blend.blend.encoding_contexts.filler import AfterFiller
from vllm_blend.blend.selectors import make_selector
from vllm_blend.checks import check_ratio
from vllm_blend.config import BlendConfig

PLAIN_REUSE = "none"  # the rule that recomputes nothing
EVERYTHING = "full"  # and the one that recomputes all
RULES = (PLAIN_REUSE, "question_attention", "question_attention(mean_shift=0)", "value_deviation")
RATIOS = (0.05, 0.08, 0.15, 0.30)
COMPANIES = (AfterFiller.name,)
QUICK_RULES = (PLAIN_REUSE, f"{BlendConfig.selector}@0.08,0.15")


@dataclass(frozen=True)
class Setting:
    """A way to blend. `ratio` is the share of the context that the rule may recompute; of `PLAIN_REUSE` it is 0."""

    rule: str
    ratio: float
    company: str

    @property
    def name(self) -> str:
        share = "" if self.rule == PLAIN_REUSE else f" {100 * self.ratio:g}%"
        return f"{self.rule}{share} ({self.company})"

    @property
    def prompt(self) -> dict[str, Any]:
        """Return the keys of a `ChunkedPrompt` that ask for it."""
        chosen = make_selector(self.rule).fixed_ratio is None
        return {"blend_selector": self.rule} | ({"blend_recompute_ratio": self.ratio} if chosen else {})


def make_settings(
    rules: Sequence[str] = RULES, ratios: Sequence[float] = RATIOS, companies: Sequence[str] = COMPANIES
) -> list[Setting]:
    """Return every rule at every ratio in every company, in this order of companies, rules and rising ratios.

    A rule is any `blend_selector`; "RULE@RATIO,RATIO" has ratios of its own. Raises ValueError that says what is wrong.
    """
    for company in companies:
        check_encoding_context(company)
    asked = [_parse(text, ratios) for text in rules]
    settings = [
        Setting(rule, ratio, company) for company in companies for rule, shares in asked for ratio in sorted(shares)
    ]
    if not settings:
        raise ValueError("there is nothing to compare: name a rule, a ratio and a company")
    twice = next((setting for index, setting in enumerate(settings) if setting in settings[:index]), None)
    if twice is not None:
        raise ValueError(f"{twice.name} is asked for twice: name each rule, ratio and company once")
    return settings


def _parse(text: str, ratios: Sequence[float]) -> tuple[str, Sequence[float]]:
    """Return a rule and its ratios. Raises ValueError for what does not exist."""
    rule, at, own = text.partition("@")
    selector = make_selector(rule)
    if selector.fixed_ratio is not None:
        if at:
            raise ValueError(f"the rule {text!r}: {rule} always recomputes {selector.fixed_ratio:g}: leave @ out")
        return rule, (selector.fixed_ratio,)
    if at:
        try:
            ratios = [float(ratio) for ratio in own.split(",")]
        except ValueError:
            raise ValueError(f"the rule {text!r} must end with shares from 0 to 1, such as @0.08,0.15") from None
    for ratio in ratios:
        check_ratio(f"the rule {text!r}: a ratio", ratio)
    return rule, ratios
