"""The forward pass of requests in head pages, as a CUDA graph can capture it: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.features.kv_compress.cache_engine import CacheEngine
from vllm_blend.features.kv_compress.hooks import DecodeMetricHook
from vllm_blend.features.kv_compress.metrics import EvictionMetric
from vllm_blend.features.kv_compress.tables import DecodeTables
from vllm_blend.models.causal_lm import CausalLM


class CompressedStep:
    """The model over one token of each request, and what the step does to the metric of the KVs. Nothing in it waits
    for the device, or looks at what the tensors hold."""

    def __init__(self, model: CausalLM, cache: CacheEngine, backend: AttentionBackend, metric: EvictionMetric) -> None:
        self.model, self.cache, self.backend, self.metric = model, cache, backend, metric
        self.decoder = backend.another()  # one row a request, and the plans of other passes stay what they are

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        tables: DecodeTables,
        lengths: Sequence[list[int]] | None = None,
    ) -> torch.Tensor:
        """Return hidden states [requests, hidden_size] for ids and positions [requests] int64.

        `lengths` has those of the rows [requests * kv_heads], by layer, for backends that ask the host. Others get
        bounds: how many KVs the tables hold.
        """
        num_layers, rows = tables.positions.shape
        logical = positions[:, None].expand(-1, rows // len(positions)).reshape(-1).contiguous()
        # Before attention, which adds to every KV that is far enough away: the newest may not be, and must not keep the
        # sum of the KV that had its slot before.
        self.cache.record_new(tables.slots, logical, 0.0 if self.metric.accumulates else float("inf"))
        starts, at_end = list(range(rows + 1)), (True,) * rows
        bounds = [tables.block_tables.shape[2] * self.cache.block_size] * rows
        by_layer = [
            AttentionMetadata(
                positions=tables.positions[layer],
                slot_mapping=tables.slots[layer],
                block_tables=tables.block_tables[layer],
                query_start_loc=starts,
                seq_lens=bounds if lengths is None else lengths[layer],
                at_end=None if lengths is None else at_end,
                rope_positions=logical,
                per_head=True,
            )
            for layer in range(num_layers)
        ]
        hooks: list[LayerHook] = []
        if self.metric.accumulates:
            hooks.append(DecodeMetricHook(self.metric, self.cache.metric, self.cache.position, self.decoder))
        caches = [self.cache.layer] * num_layers
        with forward_context(ForwardContext(by_layer[0], caches, self.decoder, hooks, by_layer=by_layer)):
            return self.model(ids)
