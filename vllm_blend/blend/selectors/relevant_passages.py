"""The sentences of the passages that the question is about, where they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from vllm_blend.blend.relevance.passages import PromptPassages, RankedSpans, Span
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

    def choose_spans(self, passages: PromptPassages, cost: Callable[[Span], int], budget: int) -> np.ndarray | None:
        ranked = passages.ranked_sentences()
        if ranked is None:
            return None
        if self.spend == "needed" and passages.asks_for_one_page():
            budget = max(1, int(budget * ONE_PAGE_SHARE))
        chosen: list[np.ndarray] = []
        left = budget
        for part in ranked:
            costs = _costs_of(part, cost)
            first = int(np.argmax(costs > 0))
            if left == budget and costs[first] > budget:  # what matters most is not passed over for what is short
                return _spans(part, [first])  # of which the beginning fits
            is_chosen, left = _fill(costs, part.ends, left)
            chosen.append(_spans(part, is_chosen))
            if left < NOT_WORTH_FILLING:
                break
        return np.concatenate(chosen)

    def passed_over_scale(self) -> float:
        return self.damping

    def score(self, evidence: Evidence) -> torch.Tensor:
        return _BY_ATTENTION.score(evidence)

    def look(self, num_layers: int) -> Look:
        return _BY_ATTENTION.look(num_layers)


def _spans(ranked: RankedSpans, which: np.ndarray | list[int]) -> np.ndarray:
    """Return some of the spans, [n, 2] int64."""
    return np.stack([ranked.starts[which], ranked.stops[which]], axis=1)


def _costs_of(ranked: RankedSpans, cost: Callable[[Span], int]) -> np.ndarray:
    """Return the cost of each span, [n] int64. Where all is candidates, or nothing is, no span is asked for."""
    costs: np.ndarray = ranked.stops - ranked.starts
    firsts = [0, *ranked.ends[:-1]]
    lows, highs = np.minimum.reduceat(ranked.starts, firsts), np.maximum.reduceat(ranked.stops, firsts)
    low, high = int(lows.min()), int(highs.max())
    if cost((low, high)) == high - low:
        return costs
    for first, end, low, high in zip(firsts, ranked.ends, lows.tolist(), highs.tolist(), strict=True):
        inside = cost((low, high))
        if inside == 0:
            costs[first:end] = 0
        elif inside < high - low:
            spans = zip(ranked.starts[first:end].tolist(), ranked.stops[first:end].tolist(), strict=True)
            costs[first:end] = [cost(span) for span in spans]
    return costs


def _fill(costs: np.ndarray, ends: Sequence[int], budget: int) -> tuple[np.ndarray, int]:
    """Return which spans are chosen, [n] bool, each that the budget still holds, and what is left of it. Groups end at
    `ends`; behind the one that leaves hardly anything of the budget, none is chosen."""
    is_chosen = np.zeros(len(costs), bool)
    firsts, left = [0, *ends[:-1]], budget
    wholes, least = np.add.reduceat(costs, firsts).tolist(), np.minimum.reduceat(costs, firsts).tolist()
    for first, end, whole, shortest in zip(firsts, ends, wholes, least, strict=True):
        if whole <= left:
            is_chosen[first:end] = True
            left -= whole
        elif shortest <= left:
            for index, own in enumerate(costs[first:end].tolist(), first):
                if own <= left:
                    is_chosen[index] = True
                    left -= own
        if left < NOT_WORTH_FILLING:
            break
    return is_chosen, left
