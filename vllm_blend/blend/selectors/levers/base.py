"""What a lever is: something small that changes which tokens a selector's scores choose."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence


class Lever(ABC):
    """Base of all levers. A subclass is a dataclass (its fields are its settings) with a `name` and one of the
    methods."""

    name: ClassVar[str]

    def apply(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """[n] float scores in place of `scores` ([n], float32 or float64, larger meaning compute this token again)."""
        return scores

    def count(self, evidence: Evidence, budget: int) -> int:
        """How many of the best candidates are chosen, at most `budget`."""
        return budget

    def mean_shift(self) -> float:
        """How much of the mean change of a chunk's recomputed tokens is added to its other tokens; 0 for nothing."""
        return 0.0

    def temperature(self) -> float:
        """What the scores of tokens that are not recomputed are divided by; 0 for nothing."""
        return 0.0


def chunk_starts(evidence: Evidence) -> torch.Tensor:
    """[n] int64, ascending: where the chunk of each candidate begins, which tells chunks apart."""
    return evidence.positions - evidence.chunk_offsets


def above_all(scores: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Scores (float64) in which the candidates `first` ([n] bool) come before all others, each kind in its order: in
    float32 a small score would be lost in the sum, or 1 in a large one."""
    scores = scores.double()
    return scores + first * (scores.max() - scores.min() + 1)
