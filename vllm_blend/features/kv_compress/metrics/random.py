"""A random choice, to compare metrics with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.features.kv_compress.metrics.base import EvictionMetric, LayerView

MULTIPLIERS = (0x7FEB352D, 0x6C8E9CF5)  # odd and below 2^31: products of them with 32 bits stay within int64
BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class RandomEviction(EvictionMetric):
    """A uniform number in [0, 1) for each KV, fixed by `seed`, layer, head and position: a KV has the same whenever it
    is scored, on any device."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def score(self, view: LayerView) -> torch.Tensor:
        kv_heads = view.positions.shape[0]
        heads = torch.arange(kv_heads, device=view.positions.device)[:, None]
        state = mix(torch.full_like(heads, self.seed & BITS))
        for part in (torch.full_like(heads, view.layer_idx), heads, view.positions):
            state = mix(state ^ (part & BITS))
        return (state >> 8).to(torch.float32) * 2.0**-24


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble numbers [...] int64 in 0 .. 2^32 - 1 one to one, by shifts and products, as any integer hash does."""
    x = (x + 0x1E3779B9) & BITS
    for multiplier in MULTIPLIERS:
        x = ((x ^ (x >> 16)) * multiplier) & BITS
    return x ^ (x >> 15)
