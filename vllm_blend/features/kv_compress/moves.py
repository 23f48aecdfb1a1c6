"""Close up the KVs that stay, so that the last pages of a head become free."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.features.kv_compress.evictions import Evictions


@dataclass(frozen=True)
class CacheMoves:
    """Slots (page * block_size + offset) whose KV, metric and position go elsewhere. All are read before any is
    written; no slot is written twice."""

    source: torch.Tensor  # [m] int64
    target: torch.Tensor  # [m] int64

    def __len__(self) -> int:
        return len(self.source)


def true_at(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return where `mask` is true, as ascending indices into `mask.flatten()`: [count] int64, without waiting for a
    GPU to count them."""
    return torch.searchsorted(mask.reshape(-1).cumsum(0), torch.arange(1, count + 1, device=mask.device))


def schedule_moves(evictions: Evictions, lengths: torch.Tensor, slots: torch.Tensor, count: int) -> CacheMoves:
    """Return moves after which the first slots of every head, as many as its new length, hold the KVs that stay.

    `lengths` [L, H] int64 are those before, `slots` [L, H, n] int64 where each KV is; all have a leading dimension if
    the evictions are of several requests. KVs of a head that lie beyond its new length go, in order, to the slots of
    evicted ones before it: as few as possible move, and no target is a source. `count` is how many (`num_moves`).
    """
    at = torch.arange(slots.shape[-1], device=slots.device)
    stays = at < evictions.new_lengths(lengths)[..., None]
    holes = evictions.evicted & stays
    moving = ~evictions.evicted & ~stays & (at < lengths[..., None])
    flat = slots.reshape(-1)
    # As many of each in every head, and in the same order.
    return CacheMoves(flat[true_at(moving, count)], flat[true_at(holes, count)])


def num_moves(evictions: Evictions, new_lengths: torch.Tensor) -> torch.Tensor:
    """Return how many KVs `schedule_moves` moves, [] int64, without waiting for a GPU."""
    at = torch.arange(evictions.evicted.shape[-1], device=new_lengths.device)
    return (evictions.evicted & (at < new_lengths[..., None])).sum()
