"""Plain reuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class NoRecompute(Selector):
    """Recompute no context token, only the suffix."""

    name: ClassVar[str] = "none"
    fixed_ratio: ClassVar[float | None] = 0.0

    def score(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros(len(evidence.positions), device=evidence.positions.device)
