"""The question's attention to a token, times how much the token's KV is off."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, LooksAt
from vllm_blend.blend.selectors.question_attention import QuestionAttention


@dataclass(frozen=True)
class AttentionDeviation(QuestionAttention):
    """Score by the question's attention (ProphetKV) times the deviation of V at the check layer (CacheBlend): by how
    much what the question reads changes if a token is recomputed. It costs the question's pass and the layers up to the
    check layer. The deviation, a distance, is raised to `power`: 0 leaves question attention."""

    name: ClassVar[str] = "attention_deviation"
    looks_at: ClassVar[LooksAt] = LooksAt.QUESTION_AND_LAYERS
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.power < math.inf:
            raise ValueError(f"power={self.power} must be a finite number, at least 0")
        if self.first_round:
            raise ValueError(
                f"first_round={self.first_round} must be 0: the check layer comes once, so the question looks once"
            )

    def score(self, evidence: Evidence) -> torch.Tensor:
        return super().score(evidence) * evidence.v_deviation().sqrt() ** self.power
