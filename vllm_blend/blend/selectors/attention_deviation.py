"""What the question looks at, times what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, LooksAt
from vllm_blend.blend.selectors.question_attention import QuestionAttention


@dataclass(frozen=True)
class AttentionDeviation(QuestionAttention):
    """The question's attention (ProphetKV) times the deviation of V at the check layer (CacheBlend): how much of what
    the question reads changes when a token is computed again. It costs the question's pass and the layers up to the
    check layer. `power` is that of the deviation, a distance: with 0 it is question attention."""

    name: ClassVar[str] = "attention_deviation"
    looks_at: ClassVar[LooksAt] = LooksAt.QUESTION_AND_LAYERS
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.power < math.inf:
            raise ValueError(f"power={self.power} must be a number from 0 on")
        if self.first_round:
            raise ValueError(f"first_round={self.first_round}: the check layer comes once, so there is one round")

    def score(self, evidence: Evidence) -> torch.Tensor:
        return super().score(evidence) * evidence.v_deviation().sqrt() ** self.power
