"""CacheBlend's rule: high-KV-deviation tokens by the change of V."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, LooksAt, Selector


@dataclass(frozen=True)
class ValueDeviation(Selector):
    """Score by the squared distance between fresh and reused V at the check layer (CacheBlend, arXiv:2405.16444,
    section 4.3)."""

    name: ClassVar[str] = "value_deviation"
    looks_at: ClassVar[LooksAt] = LooksAt.LAYERS

    def score(self, evidence: Evidence) -> torch.Tensor:
        return evidence.v_deviation()
