"""Have reused tokens attended to more sharply."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionMetadata, LayerCache
from vllm_blend.worker.reused import Reused


class TemperatureHook(LayerHook):
    """Divides the scores of reused tokens by a temperature (APE, arXiv:2502.05431), which is their K: the
    question and the answer see it, as the pages are the request's own."""

    def __init__(self, reused: Sequence[Reused]) -> None:
        """reused: with temperatures as strengths."""
        self._reused = reused

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
            where = reused.slots(reused.split(metadata)[1], metadata, cache.key.shape[1])
            cache.key[where] = (cache.key[where].float() / reused.strength).to(cache.key.dtype)
