"""A selector for measuring alone: it recomputes the very tokens that it is given, which is how oracles choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.selectors import SELECTORS, Evidence, Selector


@contextmanager
def given_tokens(rankings: Sequence[torch.Tensor], levers: str = "", damping: float = 1.0) -> Iterator[list[str]]:
    """Yield a `blend_selector` for each ranking (positions of a prompt, [n] int64, best first). It recomputes the first
    ones that its budget holds, and no others, so that it may spend less than the budget. `levers` are added to it, and
    passages of which it computes nothing are damped by `damping`, as `relevant_passages` does.

    What exact KV covers takes no budget. The selectors are known inside the context alone: no option and no test that
    goes through the registered selectors meets them.
    """

    @dataclass(frozen=True)
    class GivenTokens(Selector):
        """Recompute the tokens of a ranking."""

        name: ClassVar[str] = "given_tokens"
        chooses_passages: ClassVar[bool] = damping < 1
        entry: int = 0

        def choose_spans(self, passages: PromptPassages, cost: Callable[[Span], int], budget: int) -> list[Span] | None:
            spans = [(position, position + 1) for position in rankings[self.entry].tolist()]
            return [span for span in spans if cost(span)][:budget]

        def passed_over_scale(self) -> float:
            return damping

        def score(self, evidence: Evidence) -> torch.Tensor:
            places = {position: place for place, position in enumerate(rankings[self.entry].tolist())}
            scores = [-float(places.get(position, math.inf)) for position in evidence.positions.tolist()]
            return torch.tensor(scores, device=evidence.positions.device)

        def count(self, scores: torch.Tensor, evidence: Evidence, budget: int) -> int:
            return min(budget, int(scores.isfinite().sum()))

    SELECTORS.register(GivenTokens)
    try:
        yield [f"{GivenTokens.name}(entry={entry}){levers}" for entry in range(len(rankings))]
    finally:
        del SELECTORS[GivenTokens.name]
