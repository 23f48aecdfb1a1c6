"""How the KVs that stay close up, so that the last pages of a head become free."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.kv_compress.evictions import Evictions


@dataclass(frozen=True)
class CacheMoves:
    """Slots (page * block_size + offset) whose KV, metric and position go elsewhere. All are read before any is
    written; no slot is written twice."""

    source: torch.Tensor  # [m] int64
    target: torch.Tensor  # [m] int64

    def __len__(self) -> int:
        return len(self.source)


def schedule_moves(evictions: Evictions, lengths: torch.Tensor, slots: torch.Tensor) -> tuple[CacheMoves, torch.Tensor]:
    """Moves after which the first `new lengths` slots of every head hold the KVs that stay; and these lengths, [L, H]
    int64.

    `lengths` [L, H] int64 are those before, `slots` [L, H, n] int64 where each KV is; all with a leading dimension
    where the evictions are of several requests. KVs of a head that lie beyond its new length go, in their order, to
    where an evicted one was before it: as few as possible move, and no target is a source.
    """
    new_lengths = evictions.new_lengths(lengths)
    at = torch.arange(slots.shape[-1], device=slots.device)
    stays = at < new_lengths[..., None]
    holes = evictions.evicted & stays
    moving = ~evictions.evicted & ~stays & (at < lengths[..., None])
    return CacheMoves(slots[moving], slots[holes]), new_lengths  # as many of each in every head, and in the same order
