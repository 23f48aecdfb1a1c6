"""Decode steps of requests whose KV is in head pages: a forward pass of their own beside the step's other rows.

Each KV head of a request is a request for attention, with a table and a length of its own in every layer. In the same
pass prompts that are being computed would need tables of the other kind; a pass for each keeps both as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.core.scheduler import ScheduledRequest
from vllm_blend.kv_compress.metrics import EvictionMetric
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.ops.host_copy import to_device
from vllm_blend.worker.batch import Drawn, Span, token_row
from vllm_blend.worker.cache_engine import CacheEngine
from vllm_blend.worker.compression_hooks import DecodeMetricHook


class CompressedDecode:
    """Runs the model over the newest token of requests in head pages."""

    def __init__(
        self,
        model: nn.Module,
        cache: CacheEngine,
        tables: HeadTables,
        backend: AttentionBackend,
        metric: EvictionMetric,
    ) -> None:
        self.model, self.cache, self.tables, self.backend, self.metric = model, cache, tables, backend, metric

    def run(self, items: Sequence[ScheduledRequest], drawn: Drawn) -> torch.Tensor:
        """Hidden states [requests, hidden_size] of a step that computes one token of each request."""
        device = self.cache.head_keys.device
        indices = []
        for item in items:
            state = item.request.compression
            assert state is not None and state.index is not None and item.num_tokens == 1
            indices.append(state.index)
        batch = self.tables.decode_batch(indices)
        tokens = [token_row(Span(item.request, item.start, item.stop), drawn) for item in items]
        host = torch.tensor([[*row, item.start] for row, item in zip(tokens, items, strict=True)])
        ids, sources, positions = to_device(host, device).unbind(1)
        if any(source >= 0 for _, source in tokens):
            ids = drawn.feed(ids, sources)
        num_layers, rows = batch.positions.shape
        logical = positions.repeat_interleave(rows // len(items))
        # Before attention, which counts for every KV that is far enough away: the newest may not be, nor keep the sum
        # of whoever had its slot.
        self.cache.enter(batch.slots, logical, 0.0 if self.metric.accumulates else float("inf"))
        lengths = self.tables.lengths[indices]
        by_layer = [
            AttentionMetadata(
                positions=batch.positions[layer],
                slot_mapping=batch.slots[layer],
                block_tables=batch.block_tables[layer],
                query_start_loc=list(range(rows + 1)),
                seq_lens=lengths[:, layer].reshape(-1).tolist(),
                at_end=(True,) * rows,
                rope_positions=logical,
                per_head=True,
            )
            for layer in range(num_layers)
        ]
        hooks: list[LayerHook] = []
        if self.metric.accumulates:
            hooks.append(DecodeMetricHook(self.metric, self.cache.metric, self.cache.position))
        caches = [self.cache.layer] * num_layers
        context = ForwardContext(by_layer[0], caches, self.backend, hooks, by_layer=by_layer)
        with forward_context(context):
            return self.model(ids)
