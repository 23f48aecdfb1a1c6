"""Keep what is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.offload.predictors.base import Evidence, LooksAt, PromotionPredictor
from vllm_blend.offload.predictors.query_digest import smoothed


@dataclass(frozen=True)
class AttentionMass(PromotionPredictor):
    """Attention that each chunk has received, an exponential moving average over steps (as the heavy hitters of H2O,
    Zhang et al., arXiv:2306.14048, by chunk). A chunk out of sight keeps the score it left with: in mode "resident" it
    comes back when those inside fall below that."""

    name: ClassVar[str] = "attention_mass"
    looks_at: ClassVar[LooksAt] = LooksAt.MASS

    decay: float = 0.7

    def score(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.received_mass is not None
        return smoothed(evidence.previous, evidence.received_mass[-1], self.decay)
