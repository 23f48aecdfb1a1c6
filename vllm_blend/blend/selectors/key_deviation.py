"""LMCache's variant of CacheBlend's rule: the change of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.blend.selectors.base import Evidence, LooksAt, Selector


@dataclass(frozen=True)
class KeyDeviation(Selector):
    """Score by the squared distance between fresh and reused K at the check layer (LMCache's blender).

    Both sides are rotated to the same position, and a rotation keeps distances: this equals the distance before RoPE.
    """

    name: ClassVar[str] = "key_deviation"
    looks_at: ClassVar[LooksAt] = LooksAt.LAYERS

    def score(self, evidence: Evidence) -> torch.Tensor:
        return evidence.k_deviation()
