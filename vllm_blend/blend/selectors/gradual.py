"""CacheBlend's gradual filtering: several check layers, each keeping fewer tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, LooksAt, Selector


@dataclass(frozen=True)
class Gradual(Selector):
    """Score by the deviation of K and V, and keep fewer tokens from check layer to check layer (CacheBlend,
    arXiv:2405.16444, section 4.3, 'gradual filtering').

    The paper keeps r1 > r2 > ... > r tokens after successive layers; the shares here fall geometrically from `first`
    times the ratio to the ratio. Give several `blend_check_layers`, for example [1, 2, 3, 4].
    """

    name: ClassVar[str] = "gradual"
    looks_at: ClassVar[LooksAt] = LooksAt.LAYERS

    first: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.first < math.inf:
            raise ValueError(
                f"gradual: first={self.first} must be a finite number, at least 1: later layers keep fewer tokens"
            )

    def score(self, evidence: Evidence) -> torch.Tensor:
        k_change, v_change = evidence.k_deviation(), evidence.v_deviation()
        # The scales of K and V differ from model to model, so each counts relative to its own total.
        return k_change / k_change.sum().clamp_min(1e-12) + v_change / v_change.sum().clamp_min(1e-12)

    def shares(self, ratio: float, check_layers: Sequence[int]) -> list[float]:
        steps = len(check_layers) - 1
        return [
            min(1.0, ratio * self.first ** ((steps - i) / max(1, steps))) if i < steps else ratio
            for i in range(steps + 1)
        ]
