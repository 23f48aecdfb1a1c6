"""Compressed chunk KV: a share of a chunk's KVs, chosen for each head by what the KVs are, before it is stored.

No question is known when a chunk is stored, so only metrics that look at no query can choose. Every head keeps as many,
which leaves K and V dense tensors; which tokens these are of differs by head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_blend.kv_compress.metrics import EvictionMetric, HeadView
from vllm_blend.kv_compress.ties import tie_starts
from vllm_blend.kv_store.chunk_kv import ChunkKV


@dataclass(frozen=True)
class ChunkCompression:
    """Keeps the share `share`, in (0, 1], of a chunk's KVs: in each head those that `metric` finds worth most, at least
    one. Metrics see K as it is stored, before RoPE: what is kept does not depend on where a chunk stands."""

    metric: EvictionMetric
    share: float

    @property
    def name(self) -> str:
        """What the keys of chunks say about it."""
        return f"{self.metric!r} {self.share!r}"

    def num_kept(self, num_tokens: int) -> int:
        """KVs that each head keeps of a chunk."""
        return max(1, math.ceil(self.share * num_tokens - 1e-9))  # 0.07 of 100 is 7, whatever the product rounds to

    def compress(self, kv: ChunkKV) -> ChunkKV:
        """What is kept of a whole chunk."""
        if kv.positions is not None:
            raise ValueError("the chunk is compressed already: compress the whole one")
        layers, tokens, _, head_dim = kv.k.shape
        kept = torch.stack([self._kept(kv, layer, layers) for layer in range(layers)])  # [layers, KVs, kv_heads]
        at = kept[..., None].expand(-1, -1, -1, head_dim)
        k, v = kv.k.gather(1, at), kv.v.gather(1, at)
        return ChunkKV(k, v, content=kv.content, positions=kept.to("cpu", torch.int32), length=tokens)

    def _kept(self, kv: ChunkKV, layer: int, layers: int) -> torch.Tensor:
        """Return positions [KVs, kv_heads] int64 within the chunk, ascending: of a tie (`ties`) the earlier ones."""
        tokens, kv_heads, head_dim = kv.k.shape[1:]
        keys, values = kv.k[layer].transpose(0, 1), kv.v[layer].transpose(0, 1)
        positions = torch.arange(tokens, device=keys.device).expand(kv_heads, -1)
        valid = torch.ones_like(positions, dtype=torch.bool)
        scores = self.metric.score(HeadView(layer, layers, head_dim**-0.5, keys, values, positions, valid))
        scores = scores.nan_to_num(nan=float("-inf"))
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        order = (tie_starts(scores, self.metric.magnitude) * tokens + order).sort(dim=-1).values % tokens
        return order[:, : self.num_kept(tokens)].sort(dim=-1).values.t()
