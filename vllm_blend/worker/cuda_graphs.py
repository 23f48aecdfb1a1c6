"""Decode steps replayed as CUDA graphs: two launches instead of hundreds.

A graph ends at the hidden states, and the product that makes them logits is the second launch. What a graph returns
stays in memory as long as the graph: the logits of all graphs for up to 512 requests have 8,487 rows, 2.4 GiB in bf16
with a vocabulary of 151,936, whereas a step needs those of its own rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from vllm_blend.attention.context import ForwardContext, forward_context
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.ops.graph_capture import Capture, CUDAGraphs
from vllm_blend.ops.host_copy import fill
from vllm_blend.worker.batch import Drawn, Span, single_rows
from vllm_blend.worker.decode_rows import IDS, POSITIONS, ROPE_POSITIONS, SLOTS, SOURCES, DecodeRows
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.passes import GraphHook


@dataclass(frozen=True)
class _DecodeGraph:
    replay: Callable[[], None]
    # [5, bucket] int64: ids, positions, slots, which drawn token is to replace the id, and positions for RoPE
    rows: torch.Tensor
    block_tables: torch.Tensor  # [bucket, max_blocks] int32
    host: DecodeRows  # what is in these two
    hidden: torch.Tensor  # [bucket, hidden_size]
    hooks: Sequence[GraphHook]


def buckets(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture, largest first: their buffers serve the smaller ones too."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 513, 16)]
    return sorted({min(size, max_num_seqs) for size in sizes}, reverse=True)


class DecodeGraphs:
    """Graphs of a decode step from embedding to hidden states. Rows beyond a batch write to the padding block."""

    def __init__(
        self,
        parts: DeviceParts,
        max_num_seqs: int,
        max_model_len: int,
        make_hooks: Callable[[], Sequence[GraphHook]] = tuple,
        capture: Capture | None = None,
    ) -> None:
        """`make_hooks` makes what a graph captures beside the model; each graph has its own. `capture` makes a graph of
        what it is given; the default makes CUDA graphs."""
        self.parts = parts
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // parts.cache.block_size)
        cuda = CUDAGraphs(parts.device)
        self._graphs = {size: self._capture(size, capture or cuda, make_hooks()) for size in buckets(max_num_seqs)}
        self._sizes = sorted(self._graphs)
        self.pool = cuda.pool  # the memory that CUDA graphs share, and others may

    def run(self, spans: Sequence[Span], drawn: Drawn) -> torch.Tensor | None:
        """Return the hidden states [rows, hidden_size] of a step in which every request computes its last token and the
        drafts behind it, None if no graph fits.

        A row of drafts runs as a sequence of its own over the same blocks: all rows write their K and V before any
        attends, and each sees the positions up to its own. The result is valid until the next run.
        """
        starts = [0, *accumulate([span.stop - span.start for span in spans])]
        if starts[-1] > len(spans):
            spans = [row for span in spans for row in single_rows(span)]
        count = len(spans)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        graph = self._graphs[size]
        host, rows = graph.host, graph.host.rows
        host.update(spans, drawn)
        fill(graph.rows, rows)
        if (rows[SOURCES] >= 0).any():
            drawn.feed_into(graph.rows[IDS], graph.rows[SOURCES], rows[SOURCES])
        if host.unsent:  # they change when a request needs another block
            fill(graph.block_tables[:, : host.unsent], np.ascontiguousarray(host.tables[:, : host.unsent]))
            host.unsent = 0
        graph.replay()
        for hook in graph.hooks:
            hook.replayed(starts)
        return graph.hidden[:count]

    def _capture(self, size: int, capture: Capture, hooks: Sequence[GraphHook]) -> _DecodeGraph:
        parts, device = self.parts, self.parts.device
        rows = torch.zeros(5, size, dtype=torch.int64, device=device)
        tables = torch.zeros(size, self.max_blocks, dtype=torch.int32, device=device)
        lengths = [self.max_model_len] * size
        starts = list(range(size + 1))
        metadata = AttentionMetadata(
            rows[POSITIONS], rows[SLOTS], tables, starts, lengths, rope_positions=rows[ROPE_POSITIONS]
        )

        def step() -> torch.Tensor:
            with forward_context(ForwardContext(metadata, parts.cache.layers, parts.backend, hooks)):
                return parts.model(rows[IDS])

        replay, hidden = capture(step)
        host = DecodeRows(size, self.max_blocks, parts.cache.block_size)
        return _DecodeGraph(replay, rows, tables, host, hidden, hooks)
