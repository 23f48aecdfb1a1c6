"""Decode steps of requests in head pages, replayed as CUDA graphs.

Tables of every layer and head are data of a graph: a step copies them to where the graphs read them. All graphs share
one set of these buffers, of which a batch fills the first rows. `HeadTables` has tensors of its own, which grow and are
replaced: no graph sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_blend.features.kv_compress import cuda_ops as cuda_kv_compress
from vllm_blend.features.kv_compress.decode_step import CompressedStep
from vllm_blend.features.kv_compress.tables import PADDING, DecodeTables, HeadTables
from vllm_blend.ops.graph_capture import Capture, CUDAGraphs
from vllm_blend.ops.host_copy import fill
from vllm_blend.worker.batch import Drawn
from vllm_blend.worker.cuda_graphs import buckets


@dataclass(frozen=True)
class _HeadPageGraph:
    replay: Callable[[], None]
    rows: torch.Tensor  # [3, size] int64: ids, which drawn token is to replace the id, and positions
    tables: DecodeTables  # of size * kv_heads rows: views of the buffers
    hidden: torch.Tensor  # [size, hidden_size]


class CompressedGraphs:
    """Graphs of a step from embedding to hidden states. Rows beyond a batch are requests of one KV, in slot 0."""

    def __init__(
        self,
        step: CompressedStep,
        max_num_seqs: int,
        max_model_len: int,
        pool: Any = None,
        capture: Capture | None = None,
    ) -> None:
        """Capture a graph for each batch size. `capture` makes a graph of a function; the default makes CUDA graphs
        that share `pool`."""
        num_layers, _, block_size, kv_heads, _ = step.cache.cache.key.shape
        device, rows = step.cache.head_keys.device, max_num_seqs * kv_heads
        width = -(-max_model_len // block_size)
        self.tables = DecodeTables(
            torch.zeros(num_layers, rows, width, dtype=torch.int32, device=device),
            torch.zeros(num_layers, rows, dtype=torch.int64, device=device),
            torch.zeros(num_layers, rows, dtype=torch.int64, device=device),
        )
        self._step, self._kv_heads, self._device = step, kv_heads, device
        self._capture = capture or CUDAGraphs(device, pool)
        self._graphs = {size: self._make(size) for size in buckets(max_num_seqs)}
        self._sizes = sorted(self._graphs)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the buffers that all graphs read."""
        return self.tables.block_tables.nbytes + self.tables.positions.nbytes + self.tables.slots.nbytes

    def run(self, tables: HeadTables, indices: np.ndarray, rows: np.ndarray, drawn: Drawn) -> torch.Tensor | None:
        """Return the hidden states [requests, hidden_size] of the newest tokens of the requests `indices`, None if they
        are more than any graph takes. They are valid until the next run.

        `rows` [3, requests] int64: ids, sources (see `Drawn.feed`) and positions.
        """
        count = len(indices)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        graph = self._graphs[size]
        padded = np.zeros((3, size), np.int64)
        padded[1] = -1
        padded[:, :count] = rows
        fill(graph.rows, padded)
        if (padded[1] >= 0).any():
            drawn.feed_into(graph.rows[0], graph.rows[1], padded[1])
        batch = tables.decode_batch(np.append(indices, np.full(size - count, PADDING)))
        # Columns beyond the batch's keep what an earlier step had: no head is so long that anything reads them.
        graph.tables.block_tables[..., : batch.block_tables.shape[2]].copy_(batch.block_tables)
        graph.tables.positions.copy_(batch.positions)
        graph.tables.slots.copy_(batch.slots)
        graph.replay()
        return graph.hidden[:count]

    def _make(self, size: int) -> _HeadPageGraph:
        count = size * self._kv_heads
        rows = torch.zeros(3, size, dtype=torch.int64, device=self._device)
        shared = (self.tables.block_tables, self.tables.positions, self.tables.slots)
        tables = DecodeTables(*(tensor[:, :count] for tensor in shared))
        replay, hidden = self._capture(lambda: self._step(rows[0], rows[2], tables))
        return _HeadPageGraph(replay, rows, tables, hidden)


def can_be_captured(step: CompressedStep) -> bool:
    """Return whether a graph may hold the steps of requests in head pages. The plain torch twin that accumulates a
    metric must not: its tensors have the size of the longest request."""
    layer = step.cache.layer
    on_kernels = cuda_kv_compress.accepts(layer.key[:, 0], layer)
    return step.decoder.capturable_decode and (on_kernels or not step.metric.accumulates)
