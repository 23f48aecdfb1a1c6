"""Full prefill by way of the blend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class Full(Selector):
    """Recompute every token whose KV is not known to be exact: the answer is that of full prefill."""

    name: ClassVar[str] = "full"
    fixed_ratio: ClassVar[float | None] = 1.0

    def score(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros(len(evidence.positions), device=evidence.positions.device)
