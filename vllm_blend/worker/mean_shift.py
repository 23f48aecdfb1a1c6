"""Correct what is not computed again by what is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend import ops
from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionMetadata, LayerCache
from vllm_blend.attention.runs import to_device
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.worker.reused import Reused


@dataclass(frozen=True)
class _Moves:
    """What a step moves, of R rows and S segments with T stored tokens, one behind the other. All sizes are known to
    the host: nothing waits for the device to say what was chosen."""

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

    def on_kv(
        self,
        layer_idx: int,
        k_unrotated: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        if self._moves is None or self._moves.metadata is not metadata:  # at check layers, rows leave the step
            self._moves = _moves(self._reused, metadata, cache.key.shape[1])
        moves = self._moves
        kvs = [reused.segment.kv for reused in self._reused]
        keys = self._corrected(moves, k_unrotated, [kv.k[layer_idx] for kv in kvs])
        keys = ops.rotary_embedding(keys, *self._rotaries[layer_idx].cos_sin(moves.positions))
        values = self._corrected(moves, v, [kv.v[layer_idx] for kv in kvs])
        for pages, new in ((cache.key, keys), (cache.value, values)):
            pages[moves.slots] = torch.where(moves.is_moved, new.to(pages.dtype), pages[moves.slots])

    def _corrected(self, moves: _Moves, computed: torch.Tensor, stored: Sequence[torch.Tensor]) -> torch.Tensor:
        """[T, kv_heads, head_dim] float32: `stored`, of each segment, after the change of what is computed."""
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
    parts = [each.slots(own, metadata, block_size) for each, own in zip(reused, where.split(lengths), strict=True)]
    blocks, places_in = (torch.cat(column) for column in zip(*parts, strict=True))
    return _Moves(
        metadata=metadata,
        rows=all_rows,
        stored_at=stored_at,
        mean=computes * (strength / count.clamp_min(1))[:, None],
        segment_of=segment_of,
        positions=where,
        slots=(blocks, places_in),
        is_moved=(~is_computed[:-1] & (count > 0)[segment_of])[:, None, None],
    )
