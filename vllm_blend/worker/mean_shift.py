"""The mean shift: what is not computed again is corrected by what is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook, NewKV
from vllm_blend.attention.metadata import AttentionMetadata, LayerStep
from vllm_blend.blend.plan import Segment
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.ops.host_copy import to_device
from vllm_blend.worker.batch import Span


@dataclass(frozen=True)
class Reused:
    """A segment of a request of the step whose KV is not known to be exact, and how strongly it is corrected."""

    request: int
    segment: Segment
    stop: int  # within the context
    strength: float


def mean_shift_hook(spans: Sequence[Span], rotaries: Sequence[RotaryEmbedding]) -> MeanShiftHook | None:
    """Return the hook that corrects tokens which are reused as they are, for the selectors that ask for it; None for
    most steps."""
    reused = []
    for index, span in enumerate(spans):
        plan = span.request.blend
        if plan is None or span.positions is None:
            continue
        strength = plan.selector.mean_shift()
        if strength:
            inexact = [segment for segment in plan.segments if not segment.exact]
            reused += [Reused(index, each, min(each.stop, plan.suffix_start), strength) for each in inexact]
    return MeanShiftHook(reused, rotaries) if reused else None


@dataclass(frozen=True)
class _Moves:
    """The tokens that a step moves: R rows and S segments with T stored tokens, one behind the other. All sizes are
    known to the host: nothing waits for the device to say what was chosen."""

    metadata: AttentionMetadata  # of which it holds
    rows: torch.Tensor  # [R] int64, of the requests concerned
    stored_at: torch.Tensor  # [R] int64, the stored token that a row computes again, or any where `mean` is 0
    mean: torch.Tensor  # [S, R] float32, what the change of each row counts for each segment
    segment_of: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: tuple[torch.Tensor, torch.Tensor]  # [T] int64 each, blocks and places in them
    is_moved: torch.Tensor  # [T, 1, 1] bool


class MeanShiftHook(LayerHook):
    """Adds the mean change of K and V of a chunk's recomputed tokens to its others, layer by layer (AgentKVShift).

    K is shifted before RoPE. The pages are the request's own; what is stored stays as it is. A chunk of which nothing
    is recomputed, or all, is left alone.
    """

    def __init__(self, reused: Sequence[Reused], rotaries: Sequence[RotaryEmbedding]) -> None:
        self._reused, self._rotaries = reused, rotaries
        self._moves: _Moves | None = None

    def on_kv(self, step: LayerStep, new: NewKV) -> None:
        if self._moves is None or self._moves.metadata is not step.metadata:  # at check layers, rows leave the step
            self._moves = _moves(self._reused, step.metadata, step.kv.block_size)
        moves = self._moves
        kvs = [reused.segment.kv for reused in self._reused]
        keys = self._correct(moves, new.k_unrotated, [kv.k[step.layer_idx] for kv in kvs])
        keys = ops.rotary_embedding(keys, *self._rotaries[step.layer_idx].cos_sin(moves.positions))
        values = self._correct(moves, new.v, [kv.v[step.layer_idx] for kv in kvs])
        for pages, moved in ((step.kv.key, keys), (step.kv.value, values)):
            pages[moves.slots] = torch.where(moves.is_moved, moved.to(pages.dtype), pages[moves.slots])

    def _correct(self, moves: _Moves, computed: torch.Tensor, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `stored`, of each segment, after the change of what is computed: [T, kv_heads, head_dim] float32."""
        parts = [
            kv[: reused.stop - reused.segment.start].to(computed.device, non_blocking=True)
            for kv, reused in zip(stored, self._reused, strict=True)
        ]
        old = torch.cat(parts).float()
        change = computed[moves.rows].float() - old[moves.stored_at]
        shift = (moves.mean @ change.flatten(1)).view(-1, *old.shape[1:])
        return old + shift[moves.segment_of]


def _moves(reused: Sequence[Reused], metadata: AttentionMetadata, block_size: int) -> _Moves:
    device = metadata.positions.device
    lengths = [each.stop - each.segment.start for each in reused]
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(each.segment.start, each.stop) for each in reused])
    rows, places, offsets, size = [], [], [], 0
    for request in dict.fromkeys(each.request for each in reused):
        own = metadata.rows(request)
        place = np.full(metadata.seq_lens[request], starts[-1])  # of each position: T where nothing stored is moved
        for index, each in enumerate(reused):
            if each.request == request:
                place[each.segment.start : each.stop] = np.arange(starts[index], starts[index + 1])
        rows.append(np.arange(own.start, own.stop))
        offsets.append(np.full(len(rows[-1]), size))
        places.append(place)
        size += len(place)

    all_rows = to_device(np.concatenate(rows), device)
    segment_of = to_device(np.repeat(np.arange(len(reused)), lengths), device)
    offset = to_device(np.concatenate(offsets), device)
    at = to_device(np.concatenate(places), device)[offset + metadata.positions[all_rows]]
    stored_at = at.clamp_max(int(starts[-1]) - 1)
    computes = (segment_of[stored_at] == torch.arange(len(reused), device=device)[:, None]) & (at < int(starts[-1]))
    count = computes.sum(1)
    strength = to_device(np.array([each.strength for each in reused], np.float32), device)
    is_computed = torch.zeros(int(starts[-1]) + 1, dtype=torch.bool, device=device)
    is_computed[at] = True
    where = to_device(positions, device)
    owned = zip(reused, where.split(lengths), strict=True)
    blocks = torch.cat([metadata.block_tables[each.request][own // block_size].long() for each, own in owned])
    return _Moves(
        metadata=metadata,
        rows=all_rows,
        stored_at=stored_at,
        mean=computes * (strength / count.clamp_min(1))[:, None],
        segment_of=segment_of,
        positions=where,
        slots=(blocks, where % block_size),
        is_moved=(~is_computed[:-1] & (count > 0)[segment_of])[:, None, None],
    )
