"""The sentences of the passages that the question is about, where they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.selectors.base import Evidence, Look, LooksAt, Selector
from vllm_blend.blend.selectors.question_attention import QuestionAttention

ONE_PAGE_SHARE = 0.7  # of the budget, for a question about one page: what must be computed is on it, and not on two
NOT_WORTH_FILLING = 3  # tokens of the budget: hardly a sentence is as short
_BY_ATTENTION = QuestionAttention()


@dataclass(frozen=True)
class RelevantPassages(Selector):
    """Recompute the sentences that the question needs, whole and where they stand, and reuse all others.

    Pages of passages are ranked by the prompt's `relevance`, or else by the question's words, and those that the best
    page leads to come next; `blend/relevance/passages.py` says in which order sentences follow. Each that fits the
    budget is chosen; of the first one at least the beginning is. All this happens on the host before the forward pass:
    nothing is looked at.

    If there is no such signal (no word in common, two pages alike, a single page), tokens are chosen by the question's
    attention, as `question_attention` does.

    Passages of which nothing is computed are damped: their keys are multiplied by `damping`, so that the question and
    what is computed look at them less. They were encoded as if each stood first, and a model takes what they say about
    their subjects for what the computed passages say about theirs. (APE, Yang et al., arXiv:2502.05431, section 4.2,
    sharpens the attention to reused text instead, which lost here.) A context that is retained for other questions
    is not damped.

    With `spend="needed"`, a question that seems to ask for one page alone gets 70% of the budget, so that for the same
    work on average more is left for those that need two. With "budget" every question gets all of it.
    """

    name: ClassVar[str] = "relevant_passages"
    looks_at: ClassVar[LooksAt] = LooksAt.QUESTION
    chooses_passages: ClassVar[bool] = True
    spend: str = "needed"
    damping: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping={self.damping} must be in (0, 1]; 1 turns it off")
        if self.spend not in ("budget", "needed"):
            raise ValueError(f"spend={self.spend!r} is unknown: use 'budget' or 'needed'")

    def choose_spans(self, passages: PromptPassages, cost: Callable[[Span], int], budget: int) -> list[Span] | None:
        groups = passages.ranked_sentences()
        if groups is None:
            return None
        if self.spend == "needed" and passages.asks_for_one_page():
            budget = max(1, int(budget * ONE_PAGE_SHARE))
        chosen: list[Span] = []
        left, first = budget, None
        for group in groups:
            costs = [(span, cost(span)) for span in group]
            if first is None:
                first = next((span for span, own in costs if own), None)
                if first is not None and cost(first) > budget:
                    return [first]  # its beginning at least: what matters most is not passed over for what is short
            for span, own in costs:
                if own <= left:
                    chosen.append(span)
                    left -= own
            if left < NOT_WORTH_FILLING:
                break
        return chosen

    def passed_over_scale(self) -> float:
        return self.damping

    def score(self, evidence: Evidence) -> torch.Tensor:
        return _BY_ATTENTION.score(evidence)

    def look(self, num_layers: int) -> Look:
        return _BY_ATTENTION.look(num_layers)
