"""Correct what is not computed again by what is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionMetadata, LayerCache
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.worker.reused import Reused


class MeanShiftHook(LayerHook):
    """Adds the mean change of K and V of a chunk's recomputed tokens to its others, layer by layer (AgentKVShift).

    K is shifted before RoPE. The pages are the request's own; what is stored stays as it is. A chunk of which nothing
    is recomputed, or all, is left alone.
    """

    def __init__(self, reused: Sequence[Reused], rotaries: Sequence[RotaryEmbedding]) -> None:
        self._reused, self._rotaries = reused, rotaries

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
            fresh, kept = reused.split(metadata)
            if len(fresh) and len(kept):
                self._correct(reused, layer_idx, (k_unrotated[fresh], v[fresh]), fresh, kept, cache, metadata)

    def _correct(
        self,
        reused: Reused,
        layer_idx: int,
        computed: tuple[torch.Tensor, torch.Tensor],
        fresh: torch.Tensor,
        kept: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        """computed: K before RoPE and V of the rows `fresh`."""
        kv, start = reused.segment.kv, reused.segment.start
        corrected = []
        for new, stored in zip(computed, (kv.k, kv.v), strict=True):
            old = stored[layer_idx].to(new.device).float()
            shift = (new.float() - old[metadata.positions[fresh] - start]).mean(0)
            corrected.append(old[kept - start] + reused.strength * shift)
        rotated = ops.rotary_embedding(corrected[0], *self._rotaries[layer_idx].cos_sin(kept))
        where = reused.slots(kept, metadata, cache.key.shape[1])
        cache.key[where] = rotated.to(cache.key.dtype)
        cache.value[where] = corrected[1].to(cache.value.dtype)
