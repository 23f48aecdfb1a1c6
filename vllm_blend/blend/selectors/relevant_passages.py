"""The sentences of the passages that the question is about, where they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.selectors.base import Evidence, Look, LooksAt, Selector
from vllm_blend.blend.selectors.question_attention import QuestionAttention

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

    `spend` is "budget", or "needed" to stop after the first page if the question seems to ask for no other: less is
    computed then for easy questions, but a second page may be missed.
    """

    name: ClassVar[str] = "relevant_passages"
    looks_at: ClassVar[LooksAt] = LooksAt.QUESTION
    chooses_passages: ClassVar[bool] = True
    spend: str = "budget"

    def __post_init__(self) -> None:
        if self.spend not in ("budget", "needed"):
            raise ValueError(f"spend={self.spend!r} is unknown: use 'budget' or 'needed'")

    def choose_spans(self, passages: PromptPassages, cost: Callable[[Span], int], budget: int) -> list[Span] | None:
        groups = passages.ranked_sentences(only_needed=self.spend == "needed")
        if groups is None:
            return None
        chosen: list[Span] = []
        left, first = budget, None
        for group in groups:
            costs = [(span, cost(span)) for span in group]
            first = first or next((span for span, own in costs if own), None)
            for span, own in costs:
                if own <= left:
                    chosen.append(span)
                    left -= own
            if left < NOT_WORTH_FILLING:
                break
        return chosen if left < budget or first is None else [first]

    def score(self, evidence: Evidence) -> torch.Tensor:
        return _BY_ATTENTION.score(evidence)

    def look(self, num_layers: int) -> Look:
        return _BY_ATTENTION.look(num_layers)
