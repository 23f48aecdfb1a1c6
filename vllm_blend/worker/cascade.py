"""Cascade attention in the worker: what the requests of a step share, found once for as long as they stay together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_blend.attention.cascade import CascadeBackend, CascadeData, cascade_step
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.chunks.cascade import build_cascade_data_for_composition
from vllm_blend.worker.batch import Span

MAX_LEVELS = 4


def min_saved_tokens(on_gpu: bool) -> int:
    """Keys that a segment must keep from being read again, below which another part costs more than it saves. On an
    H200 the prefill kernel takes 22 us for 32 queries over 4096 keys (benchmarks/results/h200_kernels.md), the time in
    which decoding reads some 23,000 keys of eight KV heads of 128."""
    return 1 << 15 if on_gpu else 1 << 10


class CascadePlanner:
    """Plans steps. The requests of a batch decode together for many steps, in which nothing changes but their ends."""

    def __init__(self, block_size: int, min_saved_tokens: int, max_levels: int = MAX_LEVELS) -> None:
        self.block_size, self.max_levels = block_size, max_levels
        self.min_saved_blocks = max(1, min_saved_tokens // block_size)
        self._tables: list[list[int]] = []  # of the last plan: the requests' own lists, which end with their residence
        self._shareable: list[int] = []
        self._data: CascadeData | None = None

    def plan(self, spans: Sequence[Span]) -> CascadeData | None:
        """What the spans of a step share, None where that is too little. More blocks may be shared than a plan says
        that was made when the requests were shorter; never fewer."""
        tables = [span.request.block_table for span in spans]
        shareable = [span.start // self.block_size if span.positions is None else 0 for span in spans]
        same = len(tables) == len(self._tables) and all(a is b for a, b in zip(tables, self._tables, strict=True))
        if not (same and all(now >= then for now, then in zip(shareable, self._shareable, strict=True))):
            padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
            for row, table in zip(padded, tables, strict=True):
                row[: len(table)] = table
            self._data = build_cascade_data_for_composition(padded, shareable, self.min_saved_blocks, self.max_levels)
            self._tables, self._shareable = tables, shareable
        return self._data

    def backend(self, inner: AttentionBackend, spans: Sequence[Span], metadata: AttentionMetadata) -> AttentionBackend:
        """`inner`, or for this step what attends its shared blocks once."""
        data = self.plan(spans)
        if data is None:
            return inner
        step = cascade_step(data, metadata, self.block_size)
        return CascadeBackend(inner, [inner.another() for _ in step.levels], step)
