"""The tokens of a step's requests that are reused as they are: where they lie, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.blend.plan import Segment
from vllm_blend.worker.batch import Span


@dataclass(frozen=True)
class Reused:
    """A segment of a request of the step whose KV is not known to be exact, and how strongly it is corrected."""

    request: int
    segment: Segment
    stop: int  # within the context
    strength: float

    def split(self, metadata: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the step ([n] int64) that compute tokens of the segment, and the positions ([m] int64) of its tokens
        that no row computes."""
        rows, start = metadata.rows(self.request), self.segment.start
        where = metadata.positions[rows]
        fresh = torch.arange(rows.start, rows.stop, device=where.device)[(where >= start) & (where < self.stop)]
        is_kept = torch.ones(self.stop - start, dtype=torch.bool, device=where.device)
        is_kept[metadata.positions[fresh] - start] = False
        return fresh, is_kept.nonzero()[:, 0] + start

    def slots(self, positions: torch.Tensor, metadata: AttentionMetadata, block_size: int) -> tuple[torch.Tensor, ...]:
        """Blocks and places in them, of positions ([n] int64)."""
        blocks = metadata.block_tables[self.request][positions // block_size].long()
        return blocks, positions % block_size


def reused_of(spans: Sequence[Span], strengths: Sequence[float]) -> Iterator[Reused]:
    """The reused segments of requests with a strength other than 0."""
    for index, (span, strength) in enumerate(zip(spans, strengths, strict=True)):
        plan = span.request.blend
        for segment in plan.segments if plan is not None and strength else ():
            if not segment.exact:
                yield Reused(index, segment, min(segment.stop, plan.suffix_start), strength)  # type: ignore[union-attr]
