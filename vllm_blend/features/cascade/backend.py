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
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.attention.runs import StepPart, part_of
from vllm_blend.ops.host_copy import to_device


@dataclass(frozen=True)
class SharedSegment:
    """Blocks first_block .. stop_block - 1 of the block tables of these requests of a step, the same in all of them."""

    requests: tuple[int, ...]
    first_block: int
    stop_block: int


@dataclass(frozen=True)
class CascadeData:
    """The leading blocks that the requests of a step share. The segments of a level have no request in common; those of
    a request, level by level, are its blocks from 0 up to its `own_start`, after which its own begin."""

    levels: tuple[tuple[SharedSegment, ...], ...]
    own_start: tuple[int, ...]  # blocks, by request; 0 for those that share none

    @property
    def requests(self) -> list[int]:
        """Return the requests that share blocks with others, in order."""
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
    rest: StepPart | None = None


def cascade_step(data: CascadeData, metadata: AttentionMetadata, block_size: int) -> CascadeStep:
    """Return the tensors of a step by its plan. Every row of a request with shared blocks must come after these."""
    cascaded = data.requests
    others = [request for request in range(metadata.num_requests) if not data.own_start[request]]
    rows, whole = part_of(cascaded, metadata)
    counts = [metadata.rows(request).stop - metadata.rows(request).start for request in cascaded]
    offsets = dict(zip(cascaded, zip(accumulate(counts, initial=0), counts, strict=False), strict=True))
    starts = np.array([data.own_start[request] for request in cascaded])
    levels = tuple(_level(level, offsets, metadata, block_size) for level in data.levels)
    return CascadeStep(
        metadata,
        rows,
        _without_shared_blocks(whole, starts, counts, block_size),
        levels,
        part_of(others, metadata) if others else None,
    )


def _without_shared_blocks(
    whole: AttentionMetadata, starts: np.ndarray, counts: Sequence[int], block_size: int
) -> AttentionMetadata:
    """Return the cascaded requests without their shared blocks: attention counts the keys that are there."""
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
    segments: Sequence[SharedSegment], offsets: dict[int, tuple[int, int]], metadata: AttentionMetadata, block_size: int
) -> Level:
    """Return one level as a step. `offsets`: first row and number of rows of each request, among the cascaded rows."""
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
    """Attends the shared blocks of one step once, and the rest by `inner`. Layers with a sliding window or sinks, and
    steps that have been narrowed, are attended by `inner` as they are."""

    name = "cascade"

    def __init__(self, inner: AttentionBackend, shared: Sequence[AttentionBackend], step: CascadeStep) -> None:
        """`shared`: a backend for each level, which plans that level's step once for all layers."""
        self.inner, self.shared, self.step = inner, shared, step

    def attend(self, step: LayerStep) -> torch.Tensor:
        q, parts = step.q, self.step
        if step.window is not None or step.sinks is not None or step.metadata is not parts.metadata:
            return self.inner.attend(step)
        if parts.rest is None:
            return self._attend(step._replace(metadata=parts.own))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[parts.rows] = self._attend(step.part(parts.rows, parts.own))
        out[parts.rest.rows] = self.inner.attend(step.part(*parts.rest))
        return out

    def attention_mass(self, step: LayerStep, query_rows: list[slice]) -> list[torch.Tensor]:
        return self.inner.attention_mass(step, query_rows)

    def _attend(self, own: LayerStep) -> torch.Tensor:
        """Attend with the cascaded rows: over their own blocks, which `own` describes, and over the shared ones."""
        out, lse = self.inner.attend_with_lse(own)
        for level, backend in zip(self.step.levels, self.shared, strict=False):
            rows = level.rows
            if rows is None:
                part = backend.attend_with_lse(own._replace(metadata=level.metadata))
                out, lse = ops.merge_states(out, lse, *part)
            else:
                part = backend.attend_with_lse(own.part(rows, level.metadata))
                out[rows], lse[rows] = ops.merge_states(out[rows], lse[rows], *part)
        return out
