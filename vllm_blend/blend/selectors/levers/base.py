"""The base of all levers: small changes to the choice that a selector's scores make."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence


class Lever(ABC):
    """The base of all levers. A subclass is a frozen dataclass, whose fields are its settings, with a `name` and one of
    the methods."""

    name: ClassVar[str]

    def apply(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """Return [n] float scores to use in place of `scores` ([n], float32 or float64; the largest are recomputed)."""
        return scores

    def count(self, evidence: Evidence, budget: int) -> int:
        """Return how many of the best candidates are chosen, at most `budget`."""
        return budget

    def mean_shift(self) -> float:
        """Return how much of the mean change of a chunk's recomputed tokens is added to its other tokens."""
        return 0.0


def chunk_starts(evidence: Evidence) -> torch.Tensor:
    """Return where the chunk of each candidate begins, [n] int64, ascending. It tells chunks apart."""
    return evidence.positions - evidence.chunk_offsets


def above_all(scores: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return scores that put the candidates `first` ([n] bool) above all others, and keep the order within both."""
    scores = scores.double()  # in float32 the sum below would lose small scores
    return scores + first * (scores.max() - scores.min() + 1)
