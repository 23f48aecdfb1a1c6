"""Correct what is not computed again by what is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionMetadata, LayerCache
from vllm_blend.blend.plan import Segment
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.request import Request
from vllm_blend.worker.batch import Span


@dataclass(frozen=True)
class _Reused:
    """A reused segment of a request of the step."""

    request: int
    segment: Segment
    stop: int  # within the context
    strength: float


class MeanShiftHook(LayerHook):
    """Adds the mean change of K and V of a chunk's recomputed tokens to its others, layer by layer (AgentKVShift).

    K is shifted before RoPE. The pages are the request's own; what is stored stays as it is. A chunk of which nothing
    is recomputed, or all, is left alone.
    """

    def __init__(
        self, requests: Sequence[Request], strengths: Sequence[float], rotaries: Sequence[RotaryEmbedding]
    ) -> None:
        """requests: those of the step. strengths: what the change is multiplied by for each; 0 where it is not made."""
        self._rotaries = rotaries
        self._reused = [
            _Reused(index, segment, min(segment.stop, request.blend.suffix_start), strength)
            for index, (request, strength) in enumerate(zip(requests, strengths, strict=True))
            if strength and request.blend is not None
            for segment in request.blend.segments
            if not segment.exact
        ]

    def on_kv(
        self,
        layer_idx: int,
        k_unrotated: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        for reused in self._reused:
            self._correct(reused, layer_idx, k_unrotated, v, cache, metadata)

    def _correct(
        self,
        reused: _Reused,
        layer_idx: int,
        k_unrotated: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        rows, start, device = metadata.rows(reused.request), reused.segment.start, k_unrotated.device
        where = metadata.positions[rows]
        inside = (where >= start) & (where < reused.stop)
        fresh = torch.arange(rows.start, rows.stop, device=device)[inside]
        offsets = metadata.positions[fresh] - start
        is_kept = torch.ones(reused.stop - start, dtype=torch.bool, device=device)
        is_kept[offsets] = False
        kept = is_kept.nonzero()[:, 0]
        if len(fresh) == 0 or len(kept) == 0:
            return
        kv = reused.segment.kv
        old_k, old_v = (t[layer_idx].to(device).float() for t in (kv.k, kv.v))
        shift_k = reused.strength * (k_unrotated[fresh].float() - old_k[offsets]).mean(0)
        shift_v = reused.strength * (v[fresh].float() - old_v[offsets]).mean(0)
        positions = kept + start
        size = cache.key.shape[1]
        blocks = metadata.block_tables[reused.request][positions // size].long()
        slots = positions % size
        cos, sin = self._rotaries[layer_idx].cos_sin(positions)
        corrected = ops.rotary_embedding(old_k[kept] + shift_k, cos, sin)
        cache.key[blocks, slots] = corrected.to(cache.key.dtype)
        cache.value[blocks, slots] = (old_v[kept] + shift_v).to(cache.value.dtype)


def mean_shift_hook(spans: Sequence[Span], rotaries: Sequence[RotaryEmbedding]) -> MeanShiftHook | None:
    """The hook that a step needs, None for none."""
    strengths = [
        span.request.blend.selector.mean_shift() if span.positions is not None and span.request.blend else 0.0
        for span in spans
    ]
    if not any(strengths):
        return None
    return MeanShiftHook([span.request for span in spans], strengths, rotaries)
