"""The attention layer every model shares: rotate, write to the paged cache, attend by explicit positions."""

from __future__ import annotations

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.attention.context import current_context
from vllm_blend.layers.layernorm import RMSNorm
from vllm_blend.layers.rotary import RotaryEmbedding


class Attention(nn.Module):
    """Attention of one decoder layer over the paged KV cache of the current forward context.

    `forward(q, k, v)` takes flat [tokens, heads * head_dim] projections before RoPE, and the norms of each head of q
    and k where the architecture has them (of one eps). It returns the flat attention output and, when the step was
    narrowed here, the rows that are still active (the caller drops the others from its residual).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer_idx: int,
        rotary: RotaryEmbedding,
        scale: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_idx = layer_idx
        self.rotary = rotary
        self.scale = head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = current_context()
        for hook in context.hooks:
            hook.before_layer(self.layer_idx)
        cache, metadata = context.caches[self.layer_idx], context.of_layer(self.layer_idx)
        kv_heads = 1 if metadata.per_head else self.num_kv_heads
        q = q.reshape(-1, kv_heads * self.num_heads // self.num_kv_heads, self.head_dim)
        k_unrotated = k.reshape(-1, kv_heads, self.head_dim)
        v = v.reshape(-1, kv_heads, self.head_dim)
        kept = None
        at = metadata.positions if metadata.rope_positions is None else metadata.rope_positions
        watching = [hook for hook in context.hooks if hook.wants_kv(self.layer_idx)]
        if not watching:
            cos, sin = self.rotary.at(at)
            places = (cos, sin, cache.key, cache.value, metadata.slot_mapping)
            if norms is None:
                q = ops.rotary_and_cache(q, k_unrotated, v, *places)
            else:
                weights = (norms[0].weight, norms[1].weight, norms[0].eps)
                q = ops.norm_rotary_and_cache(q, k_unrotated, v, *weights, *places)
        else:
            if norms is not None:
                q, k_unrotated = norms[0](q), norms[1](k_unrotated)
            q, k = self.rotary(at, q, k_unrotated)
            for hook in watching:
                kept = hook.on_kv(self.layer_idx, k_unrotated, k, v, cache, metadata) or kept
            ops.reshape_and_cache(k, v, cache.key, cache.value, metadata.slot_mapping)
        if kept is not None:
            q = q[kept.rows]
            context.narrow(kept)
            metadata = context.metadata
        for hook in context.hooks:
            hook.on_query(self.layer_idx, q, cache, metadata, self.scale, self.sliding_window)
        rows = kept.rows if kept is not None else None
        wanted = context.narrow_to_outputs(self.layer_idx)
        if wanted is not None:
            q, metadata = q[wanted], context.metadata
            rows = wanted if rows is None else rows[wanted]
        out = context.backend.attend(q, cache, metadata, self.scale, self.sliding_window) if len(q) else q
        return out.reshape(-1, self.num_heads * self.head_dim), rows
