"""Decode steps replayed as CUDA graphs: one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from vllm_blend.attention.context import ForwardContext, forward_context
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.offload.attention import QueryTap
from vllm_blend.ops.graph_capture import capture
from vllm_blend.ops.host_copy import fill
from vllm_blend.worker.batch import Drawn, Span, decode_row, single_rows
from vllm_blend.worker.kv_cache import KVCache


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    # [5, bucket] int64: ids, positions, slots, which drawn token is to replace the id, and positions for RoPE
    rows: torch.Tensor
    block_tables: torch.Tensor  # [bucket, max_blocks] int32
    sent_tables: np.ndarray  # what is in them
    logits: torch.Tensor  # [bucket, vocab]
    tap: QueryTap | None


def buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture, largest first: their buffers serve the smaller ones too."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 513, 16)]
    return sorted({min(size, max_num_seqs) for size in sizes}, reverse=True)


class DecodeGraphs:
    """Graphs of a whole decode step, embedding to logits. Rows beyond a batch write to the padding block."""

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        backend: AttentionBackend,
        max_num_seqs: int,
        max_model_len: int,
        tapped_layers: Sequence[int] = (),
    ) -> None:
        self.model, self.cache, self.backend = model, cache, backend
        self.max_model_len, self.tapped_layers = max_model_len, tapped_layers
        self.tap: QueryTap | None = None  # of the last run, valid until the next one
        self.max_blocks = -(-max_model_len // cache.block_size)
        self._graphs: dict[int, _Graph] = {}
        self.pool: Any = None  # the memory that they share, and others may: no two of them run at the same time
        for size in buckets(max_num_seqs):
            captured = self._capture(size, self.pool)
            self.pool = self.pool or captured.graph.pool()
            self._graphs[size] = captured
        self._sizes = sorted(self._graphs)

    def run(self, spans: Sequence[Span], drawn: Drawn) -> torch.Tensor | None:
        """Logits [rows, vocab] of a step in which every request computes its last token and the drafts behind it, None
        if no graph fits.

        A row of drafts runs as a sequence of its own over the same blocks: all rows write their K and V before any
        attends, and each sees the positions up to its own. The logits are valid until the next run.
        """
        starts = [0, *accumulate(span.stop - span.start for span in spans)]
        if starts[-1] > len(spans):
            spans = [row for span in spans for row in single_rows(span)]
        count = len(spans)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        graph, block_size = self._graphs[size], self.cache.block_size
        rows = np.zeros((5, size), np.int64)
        rows[3] = -1
        width = max(len(span.request.block_table) for span in spans)
        tables = np.zeros((size, width), np.int32)
        for index, span in enumerate(spans):
            residency = span.request.residency
            table = span.request.block_table if residency is None else residency.device_table()
            tables[index, : len(table)] = table
        rows[:4, :count] = np.array([decode_row(span, block_size, drawn) for span in spans], np.int64).T
        rows[4] = rows[1]
        rows[1, :count] -= [span.num_missing_blocks * block_size for span in spans]
        fill(graph.rows, rows)
        if (rows[3] >= 0).any():
            drawn.feed_into(graph.rows[0], graph.rows[3], rows[3])
        if not np.array_equal(graph.sent_tables[:, :width], tables):  # they change when a request needs another block
            fill(graph.block_tables[:, :width], tables)
            graph.sent_tables[:, :width] = tables
        graph.graph.replay()
        self.tap = None if graph.tap is None else graph.tap.by_request(starts)
        return graph.logits[:count]

    def _capture(self, size: int, pool: Any) -> _Graph:
        device = self.cache.key.device
        rows = torch.zeros(5, size, dtype=torch.int64, device=device)
        tables = torch.zeros(size, self.max_blocks, dtype=torch.int32, device=device)
        lengths = [self.max_model_len] * size
        metadata = AttentionMetadata(rows[1], rows[2], tables, list(range(size + 1)), lengths, rope_positions=rows[4])
        tap = QueryTap(self.tapped_layers, copies=True) if self.tapped_layers else None
        hooks = () if tap is None else (tap,)

        def step() -> torch.Tensor:
            with forward_context(ForwardContext(metadata, self.cache.layers, self.backend, hooks)):
                return self.model.compute_logits(self.model(rows[0]))  # type: ignore[operator]

        graph, logits = capture(step, device, pool)
        return _Graph(graph, rows, tables, np.zeros(tables.shape, np.int32), logits, tap)
