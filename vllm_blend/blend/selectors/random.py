"""The baseline: a random choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class RandomTokens(Selector):
    """Choose tokens uniformly at random. The context's tokens and `seed` fix the choice."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int):
            raise ValueError(f"random: seed={self.seed!r} must be a whole number")

    def score(self, evidence: Evidence) -> torch.Tensor:
        generator = torch.Generator().manual_seed((evidence.seed + self.seed) % 2**63)
        return torch.rand(len(evidence.positions), generator=generator).to(evidence.positions.device)
