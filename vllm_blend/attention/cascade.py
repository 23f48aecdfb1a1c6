"""Cascade attention: pages that several requests of a step share are attended once for all of them.

The keys of a request are the union of shared segments and its own rest. Each segment is attended by the queries of all
its requests together, as if they were one request with many queries; the parts are merged by their log-sum-exp
(Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade inference", FlashInfer, 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from vllm_blend import ops
from vllm_blend.attention.hybrid import part_of
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.attention.runs import to_device


@dataclass(frozen=True)
class Segment:
    """Blocks first_block .. stop_block - 1 of the block tables of these requests of a step, the same in all of them."""

    requests: tuple[int, ...]
    first_block: int
    stop_block: int


@dataclass(frozen=True)
class CascadeData:
    """Which leading blocks the requests of a step share. The segments of a level have no request in common; those of a
    request, level by level, are its blocks from 0 up to its `own_start`, after which its own begin."""

    levels: tuple[tuple[Segment, ...], ...]
    own_start: tuple[int, ...]  # blocks, by request; 0 for those that share none

    @property
    def requests(self) -> list[int]:
        """Those that share blocks with others, in order."""
        return [request for request, start in enumerate(self.own_start) if start]


@dataclass(frozen=True)
class Level:
    """A level as a step of its own, its segments as the requests: which of the cascaded rows have a part in it (None:
    all of them, as they come), and in what order."""

    rows: torch.Tensor | None  # [n] int64
    metadata: AttentionMetadata


@dataclass(frozen=True)
class CascadeStep:
    """The rows of a step that are attended in parts, and those that are not (None: there are none)."""

    metadata: AttentionMetadata  # of the whole step
    rows: torch.Tensor | slice
    own: AttentionMetadata
    levels: tuple[Level, ...]
    rest: tuple[torch.Tensor | slice, AttentionMetadata] | None = None


def cascade_step(data: CascadeData, metadata: AttentionMetadata, block_size: int) -> CascadeStep:
    """The tensors of a step by its plan. Every row of a request with shared blocks must come after these."""
    cascaded = data.requests
    others = [request for request in range(metadata.num_requests) if not data.own_start[request]]
    rows, whole = part_of(cascaded, metadata) if others else (slice(0, metadata.num_tokens), metadata)
    counts = [metadata.rows(request).stop - metadata.rows(request).start for request in cascaded]
    offsets = dict(zip(cascaded, zip(accumulate(counts, initial=0), counts, strict=False), strict=True))
    starts = np.array([data.own_start[request] for request in cascaded])
    levels = tuple(_level(level, offsets, metadata, block_size) for level in data.levels)
    return CascadeStep(
        metadata,
        rows,
        _own(whole, starts, counts, block_size),
        levels,
        part_of(others, metadata) if others else None,
    )


def _own(whole: AttentionMetadata, starts: np.ndarray, counts: Sequence[int], block_size: int) -> AttentionMetadata:
    """The cascaded requests without their shared blocks: attention counts the keys that are there."""
    device, width = whole.positions.device, whole.block_tables.shape[1]
    columns = np.minimum(np.arange(width)[None] + starts[:, None], width - 1)
    skipped = starts * block_size
    return replace(
        whole,
        positions=whole.positions - to_device(np.repeat(skipped, counts), device),
        block_tables=whole.block_tables.gather(1, to_device(columns, device)).contiguous(),
        seq_lens=[n - skip for n, skip in zip(whole.seq_lens, skipped.tolist(), strict=True)],
        device_query_start_loc=None,
        rope_positions=None,
    )


def _level(
    segments: Sequence[Segment], offsets: dict[int, tuple[int, int]], metadata: AttentionMetadata, block_size: int
) -> Level:
    """`offsets`: first row and number of rows of each request, among the cascaded rows."""
    device = metadata.positions.device
    pieces = [np.arange(offsets[r][0], offsets[r][0] + offsets[r][1]) for s in segments for r in s.requests]
    rows = np.concatenate(pieces)
    lengths = [(segment.stop_block - segment.first_block) * block_size for segment in segments]
    counts = [sum(offsets[request][1] for request in segment.requests) for segment in segments]
    width = max(segment.stop_block - segment.first_block for segment in segments)
    columns = np.array([np.minimum(s.first_block + np.arange(width), s.stop_block - 1) for s in segments])
    owners = to_device(np.array([segment.requests[0] for segment in segments]), device)
    in_order = len(rows) == sum(count for _, count in offsets.values()) and bool((np.diff(rows) == 1).all())
    return Level(
        rows=None if in_order else to_device(rows, device),
        metadata=AttentionMetadata(
            positions=to_device(np.repeat(np.array(lengths) - 1, counts), device),  # all keys are seen
            slot_mapping=metadata.slot_mapping[:0],
            block_tables=metadata.block_tables[owners].gather(1, to_device(columns, device)).contiguous(),
            query_start_loc=[0, *accumulate(counts)],
            seq_lens=lengths,
        ),
    )


class CascadeBackend(AttentionBackend):
    """For one step: its shared blocks once, the rest by `inner`. Layers with a sliding window, and steps that have been
    narrowed, are attended by `inner` as they are."""

    name = "cascade"

    def __init__(self, inner: AttentionBackend, shared: Sequence[AttentionBackend], step: CascadeStep) -> None:
        """`shared`: a backend for each level, which plans that level's step once for all layers."""
        self.inner, self.shared, self.step = inner, shared, step

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        step = self.step
        if sliding_window is not None or metadata is not step.metadata:
            return self.inner.attend(q, cache, metadata, scale, sliding_window)
        if step.rest is None:
            return self._attend(q, cache, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[step.rows] = self._attend(q[step.rows], cache, scale)
        rows, rest = step.rest
        out[rows] = self.inner.attend(q[rows], cache, rest, scale)
        return out

    def attention_mass(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
    ) -> list[torch.Tensor]:
        return self.inner.attention_mass(q, cache, metadata, scale, query_rows, sliding_window)

    def _attend(self, q: torch.Tensor, cache: LayerCache, scale: float) -> torch.Tensor:
        out, lse = self.inner.attend_with_lse(q, cache, self.step.own, scale)
        for level, backend in zip(self.step.levels, self.shared, strict=False):
            rows = level.rows
            if rows is None:
                part = backend.attend_with_lse(q, cache, level.metadata, scale)
                out, lse = ops.merge_states(out, lse, *part)
            else:
                part = backend.attend_with_lse(q[rows], cache, level.metadata, scale)
                out[rows], lse[rows] = ops.merge_states(out[rows], lse[rows], *part)
        return out
