"""Recompute some tokens of every chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence
from vllm_blend.blend.selectors.levers.base import Lever, above_all, chunk_starts


@dataclass(frozen=True)
class ChunkMinimum(Lever):
    """Take the best `tokens` tokens of every chunk before all others: no chunk stays as it was, however low its
    scores."""

    name: ClassVar[str] = "chunk_minimum"
    tokens: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"chunk_minimum: tokens={self.tokens} must be a whole number of tokens, at least 1")

    def apply(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        best = torch.sort(scores, descending=True, stable=True).indices
        starts = chunk_starts(evidence)[best]
        order = torch.sort(starts, stable=True).indices  # chunk by chunk, the best of each first
        starts = starts[order]
        ranks = torch.arange(len(starts), device=starts.device) - torch.searchsorted(starts, starts)
        is_first = torch.zeros_like(starts, dtype=torch.bool)
        is_first[best[order]] = ranks < self.tokens
        return above_all(scores, is_first)
