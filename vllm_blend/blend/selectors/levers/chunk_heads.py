"""Always recompute the first tokens of each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence
from vllm_blend.blend.selectors.levers.base import Lever, above_all


@dataclass(frozen=True)
class ChunkHeads(Lever):
    """Take the first `tokens` tokens of every chunk before all others (EPIC, arXiv:2410.15332, LegoLink): a chunk that
    was encoded alone has its attention sink there."""

    name: ClassVar[str] = "chunk_heads"
    tokens: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"chunk_heads: tokens={self.tokens} must be a whole number of tokens, at least 1")

    def apply(self, scores: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        return above_all(scores, evidence.chunk_offsets < self.tokens)
