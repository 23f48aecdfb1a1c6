"""KV-Compress in a worker: decode steps over head pages, and scores of the prompts that blocks hold.

In a decode step, each KV head of a request is a request for attention, with a table and a length of its own in every
layer. In the same pass prompts that are being computed would need tables of the other kind; a pass for each keeps both
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_blend.attention.context import LayerHook
from vllm_blend.core.step import ScheduledRequest
from vllm_blend.features.kv_compress.cache_engine import CacheEngine
from vllm_blend.features.kv_compress.config import KVCompressConfig
from vllm_blend.features.kv_compress.decode_step import CompressedStep
from vllm_blend.features.kv_compress.evictions import SORTED_BYTES, SORTED_TOGETHER
from vllm_blend.features.kv_compress.graphs import CompressedGraphs, can_be_captured
from vllm_blend.features.kv_compress.hooks import PromptMetric
from vllm_blend.features.kv_compress.state import HeadPageTable
from vllm_blend.features.kv_compress.tables import DecodeTables, HeadTables
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.ops.host_copy import to_device
from vllm_blend.worker.batch import Drawn, Span, token_row
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.memory import must_fit
from vllm_blend.worker.passes import Pass, PassOutput, WorkerExtension, WorkerSpec
from vllm_blend.worker.runner_output import RunnerOutput

REMEDY = "lower gpu_memory_utilization, max_num_seqs or max_model_len, or give enforce_eager=True"


class CompressedDecode:
    """Runs the model over the newest token of requests in head pages, by a graph if one fits (a `Pass`)."""

    def __init__(self, step: CompressedStep, graphs: CompressedGraphs | None = None) -> None:
        self.step, self.cache, self.graphs = step, step.cache, graphs

    def accepts(self, item: ScheduledRequest) -> bool:
        """Return whether the request is in head pages."""
        return isinstance(item.request.pages, HeadPageTable)

    def run(self, items: Sequence[ScheduledRequest], drawn: Drawn, result: RunnerOutput) -> PassOutput:
        """Compute one token of each request."""
        if self.step.metric.accumulates:
            for item in items:
                assert isinstance(item.request.pages, HeadPageTable)
                item.request.pages.state.num_summed = item.stop
        return PassOutput(self.step.model.compute_logits(self._hidden(items, drawn)), items)

    def _hidden(self, items: Sequence[ScheduledRequest], drawn: Drawn) -> torch.Tensor:
        """Return hidden states [requests, hidden_size], which are valid until the next run."""
        tables, indices, rows = _rows(items, drawn)
        if self.graphs is not None:
            hidden = self.graphs.run(tables, indices, rows, drawn)
            if hidden is not None:
                return hidden
        device = self.cache.head_keys.device
        ids, sources, positions = to_device(rows, device)
        if (rows[1] >= 0).any():
            ids = drawn.feed(ids, sources)
        batch = tables.decode_batch(indices)
        return self.step(ids, positions, batch, self._lengths(tables, indices, batch))

    def _lengths(self, tables: HeadTables, indices: np.ndarray, batch: DecodeTables) -> list[list[int]] | None:
        """Return the lengths of the rows by layer, None if the backend does not ask the host for them."""
        if self.step.decoder.capturable_decode:
            return None
        lengths = tables.lengths[indices]
        return [lengths[:, layer].reshape(-1).tolist() for layer in range(len(batch.positions))]


def _rows(items: Sequence[ScheduledRequest], drawn: Drawn) -> tuple[HeadTables, np.ndarray, np.ndarray]:
    """Return the tables that all requests are in, their indices there, and [3, requests] int64: ids, sources (see
    `Drawn.feed`) and positions."""
    tables: HeadTables | None = None
    indices, rows = [], []
    for item in items:
        pages = item.request.pages
        assert isinstance(pages, HeadPageTable) and item.num_tokens == 1
        tables = pages.tables
        indices.append(pages.index)
        rows.append((*token_row(Span(item.request, item.start, item.stop), drawn), item.start))
    assert tables is not None
    return tables, np.array(indices, np.int64), np.ascontiguousarray(np.array(rows, np.int64).T)


class CompressionPasses(WorkerExtension):
    """Runs requests in head pages in a pass of their own. A step that computes queries which the metric looks at runs
    without CUDA graphs."""

    cache_engine: CacheEngine  # these two once it is built
    decode: CompressedDecode

    def __init__(self, config: KVCompressConfig, spec: WorkerSpec) -> None:
        self.spec, self.metric = spec, config.make_metric()
        self.window = config.prefill_metric_collection_window_size if self.metric.watches else 0
        self._prompt_metric: PromptMetric | None = None

    @property
    def _num_heads(self) -> int:
        """Return the number of KV heads in all layers."""
        return self.spec.shape.num_layers * self.spec.shape.kv_heads

    def bytes_per_block(self) -> int:
        """Return the bytes of the metric and the position of every KV of a block."""
        spec = self.spec
        return CacheEngine.bytes_per_block(spec.shape.num_layers, spec.config.cache.block_size, spec.shape.kv_heads)

    def table_bytes(self) -> int:
        """Return the bytes of the tables of requests in head pages, at most: the engine's, those that they replace when
        they grow, a step's, and what graphs read."""
        spec, config = self.spec, self.spec.config
        width = -(-spec.max_model_len // config.cache.block_size)
        one = self._num_heads * config.scheduler.max_num_seqs * width * torch.int32.itemsize
        return (4 if spec.wants_graphs else 3) * one

    def bytes_between_steps(self) -> int:
        """Return the bytes that choosing the KVs to evict takes, at most."""
        most = max(SORTED_TOGETHER, self._num_heads * self.spec.max_model_len)
        return most * (SORTED_BYTES + torch.float32.itemsize + torch.int64.itemsize)

    def build(self, parts: DeviceParts, graph_pool: Any) -> None:
        """Take the cache as head pages, and capture the steps over them."""
        self.cache_engine = CacheEngine(parts.cache)
        step = CompressedStep(parts.model, self.cache_engine, parts.backend, self.metric)
        self.decode = CompressedDecode(step, self._capture(step, graph_pool))
        if self.metric.watches:
            rotaries = [attention.rotary for attention in attention_layers(parts.model)]
            self._prompt_metric = PromptMetric(self.metric, self.window, rotaries)

    @torch.inference_mode()
    def _capture(self, step: CompressedStep, graph_pool: Any) -> CompressedGraphs | None:
        if not (self.spec.wants_graphs and can_be_captured(step)):
            return None
        with must_fit("the CUDA graphs of requests in head pages", REMEDY, self.spec.device):
            sizes = (self.spec.config.scheduler.max_num_seqs, self.spec.max_model_len)
            return CompressedGraphs(step, *sizes, pool=graph_pool)

    def passes(self) -> Sequence[Pass]:
        """Return the pass over head pages."""
        return (self.decode,)

    def needs_eager(self, items: Sequence[ScheduledRequest]) -> bool:
        """Return whether the items compute queries that the metric looks at."""
        return self.hook(items) is not None

    def hook(self, items: Sequence[ScheduledRequest]) -> LayerHook | None:
        """Return what scores the prompts of the items, None if they compute no query that the metric looks at."""
        return None if self._prompt_metric is None else self._prompt_metric.hook(items)
