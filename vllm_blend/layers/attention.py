"""The attention layer that every model shares: rotate, write to the paged cache, attend by explicit positions."""

from __future__ import annotations

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.attention.context import NewKV, current_context
from vllm_blend.attention.kv_scales import KVScales
from vllm_blend.attention.metadata import LayerStep
from vllm_blend.distributed.sharding import Layout, Share, row_layout
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
        sliding_window: int | None = None,
        scale: float | None = None,
        kv_copies: int = 1,
        sink_heads: Share | None = None,
    ) -> None:
        super().__init__()
        self.kv_copies = kv_copies  # ranks that have each of the KV heads
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_idx = layer_idx
        self.rotary = rotary
        self.scale = head_dim**-0.5 if scale is None else scale  # of Q K^T
        self.sliding_window = sliding_window
        self.kv_scales: KVScales | None = None  # set for the pages that need them, before anything is written
        self.sink_heads = sink_heads  # the query heads that are here, of a model with sinks
        sinks = None if sink_heads is None else nn.Parameter(torch.empty(num_heads), requires_grad=False)
        self.register_parameter("sinks", sinks)

    sinks: nn.Parameter | None  # see `LayerStep.sinks`

    def layouts(self) -> dict[str, Layout]:
        """Return the layout of the sinks, if these are one rank's share of them."""
        if self.sinks is None or self.sink_heads is None or self.sink_heads.is_whole:
            return {}
        return {"sinks": row_layout([self.sink_heads], self.sinks.detach())}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = current_context()
        for hook in context.hooks:
            hook.before_layer(self.layer_idx)
        kv, metadata = context.caches[self.layer_idx], context.of_layer(self.layer_idx)
        kv_heads = 1 if metadata.per_head else self.num_kv_heads
        q = q.reshape(-1, kv_heads * self.num_heads // self.num_kv_heads, self.head_dim)
        k_unrotated = k.reshape(-1, kv_heads, self.head_dim)
        v = v.reshape(-1, kv_heads, self.head_dim)
        rows = None
        at = metadata.positions if metadata.rope_positions is None else metadata.rope_positions
        watching = [hook for hook in context.hooks if hook.wants_kv(self.layer_idx)]
        looking = [hook for hook in context.hooks if hook.wants_unrotated_kv()]
        scales, group = self.kv_scales, self.num_heads // self.num_kv_heads
        if norms is not None and (watching or looking or scales is not None):
            q, k_unrotated = norms[0](q), norms[1](k_unrotated)
            norms = None
        if scales is not None:
            q, k_unrotated, v = scales.to_units(q, k_unrotated, v, group)
        if not watching:
            for hook in looking:
                hook.on_unrotated_kv(self.layer_idx, kv, metadata, k_unrotated, v)
            cos, sin = self.rotary.at(at)
            by_head = None if norms is None else ops.HeadNorms(norms[0].weight, norms[1].weight, norms[0].eps)
            q = ops.rotary_and_cache(q, k_unrotated, v, cos, sin, kv, metadata.slot_mapping, by_head)
            step = LayerStep(q, kv, metadata, self.scale, self.sliding_window, self.layer_idx, self.sinks, scales)
        else:
            q, k = self.rotary(at, q, k_unrotated)
            step = LayerStep(q, kv, metadata, self.scale, self.sliding_window, self.layer_idx, self.sinks, scales)
            new, kept = NewKV(k_unrotated, k, v), None
            for hook in watching:
                kept = hook.on_kv(step, new) or kept
            for hook in looking:
                hook.on_unrotated_kv(self.layer_idx, kv, metadata, k_unrotated, v)
            ops.reshape_and_cache(k, v, kv, metadata.slot_mapping)
            if kept is not None:
                rows = kept.rows
                context.narrow(kept)
                step = step.part(rows, context.metadata)
        for hook in context.hooks:
            hook.on_query(step)
        wanted = context.narrow_to_outputs(self.layer_idx)
        if wanted is not None:
            step = step.part(wanted, context.metadata)
            rows = wanted if rows is None else rows[wanted]
        out = context.backend.attend(step) if len(step.q) else step.q
        if scales is not None:
            out = scales.from_units(out, group)
        return out.reshape(-1, self.num_heads * self.head_dim), rows
