"""Decode steps with cascade attention, replayed as CUDA graphs.

A graph has one level of up to `MAX_GROUPS` groups, whose sizes and blocks are data: it serves any batch in which so
many groups of requests share their leading blocks. A request that shares nothing is a group of its own, over its first
block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_blend.attention.context import ForwardContext, forward_context
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.features.cascade.backend import CascadeBackend, CascadeData, CascadeStep, Level
from vllm_blend.features.cascade.planner import CascadePlanner
from vllm_blend.ops.graph_capture import Capture, CUDAGraphs
from vllm_blend.ops.host_copy import fill, to_device
from vllm_blend.worker.batch import Drawn, Span, decode_row
from vllm_blend.worker.device_parts import DeviceParts

MAX_GROUPS = 8
SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)  # batches


@dataclass(frozen=True)
class Groups:
    """The requests of a step in an order in which those that share blocks stand together."""

    order: list[int]
    sizes: list[int]  # requests of each group
    num_blocks: list[int]  # that they share

    @classmethod
    def from_plan(cls, data: CascadeData, num_shareable: Sequence[int]) -> Groups | None:
        """Group by the first level of a plan; return None if that makes too many groups, or a request has no block to
        share."""
        groups = [(segment.requests, segment.stop_block) for segment in data.levels[0]]
        shared = {request for requests, _ in groups for request in requests}
        groups += [((request,), 1) for request in range(len(num_shareable)) if request not in shared]
        if len(groups) > MAX_GROUPS or min(num_shareable) < 1:
            return None
        return cls(
            [request for requests, _ in groups for request in requests],
            [len(requests) for requests, _ in groups],
            [blocks for _, blocks in groups],
        )


@dataclass(frozen=True)
class _Buffers:
    """The tensors that a graph reads: they are filled before every replay."""

    rows: (
        torch.Tensor
    )  # [6, size] int64: ids, positions, slots, sources of drawn ids, positions in own and shared blocks
    own_tables: torch.Tensor  # [size, max_blocks] int32
    shared_tables: torch.Tensor  # [MAX_GROUPS, max_blocks] int32
    starts: torch.Tensor  # [MAX_GROUPS + 1] int32: rows of the groups


@dataclass(frozen=True)
class _CascadeGraph:
    replay: Callable[[], None]
    buffers: _Buffers
    hidden: torch.Tensor  # [size, hidden_size]


class CascadeGraphs:
    """Graphs of a decode step from embedding to hidden states. Rows beyond a batch write to the padding block and
    belong to its last group."""

    def __init__(
        self,
        parts: DeviceParts,
        planner: CascadePlanner,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture | None = None,
        pool: Any = None,
    ) -> None:
        """`capture` makes a graph of what it is given; the default makes CUDA graphs that share `pool`."""
        self.parts, self.planner, self.max_model_len = parts, planner, max_model_len
        self.max_blocks = -(-max_model_len // parts.cache.block_size)
        self._capture = capture or CUDAGraphs(parts.device, pool)
        sizes = sorted({min(size, max_num_seqs) for size in SIZES}, reverse=True)
        self._graphs = {size: self._make(size) for size in sizes}

    def run(self, spans: Sequence[Span], drawn: Drawn) -> torch.Tensor | None:
        """Return the hidden states [len(spans), hidden_size] of a step in which every request computes its last token;
        None if no graph fits, or too little is shared. They are valid until the next run."""
        size = min((size for size in self._graphs if size >= len(spans)), default=None)
        data = None if size is None else self.planner.plan(spans)
        if size is None or data is None:
            return None
        block_size = self.parts.cache.block_size
        groups = Groups.from_plan(data, [span.start // block_size for span in spans])
        if groups is None:
            return None
        graph = self._graphs[size]
        _fill(graph.buffers, [spans[index] for index in groups.order], groups, block_size, drawn)
        graph.replay()
        if groups.order == list(range(len(spans))):
            return graph.hidden[: len(spans)]
        inverse = torch.from_numpy(np.argsort(groups.order))
        return graph.hidden[to_device(inverse, graph.hidden.device)]

    def _make(self, size: int) -> _CascadeGraph:
        parts, device = self.parts, self.parts.device
        buffers = _Buffers(
            rows=torch.zeros(6, size, dtype=torch.int64, device=device),
            own_tables=torch.zeros(size, self.max_blocks, dtype=torch.int32, device=device),
            shared_tables=torch.zeros(MAX_GROUPS, self.max_blocks, dtype=torch.int32, device=device),
            starts=torch.full((MAX_GROUPS + 1,), size, dtype=torch.int32, device=device),
        )
        buffers.starts[0] = 0
        longest = self.max_model_len
        rows, each = buffers.rows, list(range(size + 1))
        whole = AttentionMetadata(rows[1], rows[2], buffers.own_tables, each, [longest] * size)
        own = AttentionMetadata(rows[4], rows[2], buffers.own_tables, each, [longest] * size)
        shared = AttentionMetadata(
            rows[5],
            rows[2],
            buffers.shared_tables,
            [0] * MAX_GROUPS + [size],
            [longest] * MAX_GROUPS,
            device_query_start_loc=buffers.starts,
        )
        step = CascadeStep(whole, slice(0, size), own, (Level(None, shared),))
        backend = CascadeBackend(parts.backend, [parts.backend.another()], step)

        def work() -> torch.Tensor:
            with forward_context(ForwardContext(whole, parts.cache.layers, backend)):
                return parts.model(rows[0])

        replay, hidden = self._capture(work)
        return _CascadeGraph(replay, buffers, hidden)


def _fill(buffers: _Buffers, spans: Sequence[Span], groups: Groups, block_size: int, drawn: Drawn) -> None:
    """Write a step to the buffers of a graph; `spans` in the order of the groups."""
    count, size = len(spans), buffers.rows.shape[1]
    shared = np.repeat(groups.num_blocks, groups.sizes)  # blocks, by row
    rows = np.zeros((6, size), np.int64)
    rows[3] = -1
    rows[:4, :count] = np.array([decode_row(span, block_size, drawn) for span in spans], np.int64).T
    rows[4, :count] = rows[1, :count] - shared * block_size
    rows[5] = shared[-1] * block_size - 1  # rows beyond the batch: as the last group's, so that positions ascend
    rows[5, :count] = shared * block_size - 1
    width = max(len(span.request.block_table) - n for span, n in zip(spans, shared, strict=True))
    own = np.zeros((size, width), np.int32)
    for row, span, first in zip(own, spans, shared, strict=False):
        table = span.request.block_table[first:]
        row[: len(table)] = table
    tables = np.zeros((MAX_GROUPS, max(groups.num_blocks)), np.int32)
    starts = np.full(MAX_GROUPS + 1, size, np.int32)
    starts[0] = row_index = 0
    for index, (members, blocks) in enumerate(zip(groups.sizes, groups.num_blocks, strict=True)):
        tables[index, :blocks] = spans[row_index].request.block_table[:blocks]
        starts[index] = row_index
        row_index += members
    fill(buffers.rows, rows)
    if (rows[3] >= 0).any():
        drawn.feed_into(buffers.rows[0], buffers.rows[3], rows[3])
    fill(buffers.own_tables[:, :width], own)
    fill(buffers.shared_tables[:, : tables.shape[1]], tables)
    fill(buffers.starts, starts)
