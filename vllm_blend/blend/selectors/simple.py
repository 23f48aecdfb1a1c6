"""The rules to compare with: a random choice, nothing, everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class Random(Selector):
    """A uniform choice, fixed by the context's tokens and `seed`."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int):
            raise ValueError(f"random: seed={self.seed!r} must be a whole number")

    def score(self, evidence: Evidence) -> torch.Tensor:
        generator = torch.Generator().manual_seed((evidence.seed + self.seed) % 2**63)
        return torch.rand(len(evidence.positions), generator=generator).to(evidence.positions.device)


@dataclass(frozen=True)
class NoRecompute(Selector):
    """Plain reuse: no context token is computed again, only the suffix is."""

    name: ClassVar[str] = "none"
    fixed_ratio: ClassVar[float | None] = 0.0

    def score(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros(len(evidence.positions), device=evidence.positions.device)


@dataclass(frozen=True)
class Full(Selector):
    """Every token whose KV is not exact is computed again: full prefill through the blend's own path."""

    name: ClassVar[str] = "full"
    fixed_ratio: ClassVar[float | None] = 1.0

    def score(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros(len(evidence.positions), device=evidence.positions.device)
