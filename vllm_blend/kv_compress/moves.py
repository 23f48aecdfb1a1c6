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


def true_at(mask: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Where `mask` is true, as places in `mask.flatten()`, ascending: [count] int64. A GPU is waited for unless the
    host knows the count."""
    flat = mask.reshape(-1)
    if count is None:
        return flat.nonzero().squeeze(-1)
    return torch.searchsorted(flat.cumsum(0), torch.arange(1, count + 1, device=mask.device))


def schedule_moves(
    evictions: Evictions, lengths: torch.Tensor, slots: torch.Tensor, count: int | None = None
) -> tuple[CacheMoves, torch.Tensor]:
    """Moves after which the first `new lengths` slots of every head hold the KVs that stay; and these lengths, [L, H]
    int64.

    `lengths` [L, H] int64 are those before, `slots` [L, H, n] int64 where each KV is; all with a leading dimension
    where the evictions are of several requests. KVs of a head that lie beyond its new length go, in their order, to
    where an evicted one was before it: as few as possible move, and no target is a source. `count`: how many
    (`num_moves`); a GPU is waited for where it is not given.
    """
    new_lengths = evictions.new_lengths(lengths)
    at = torch.arange(slots.shape[-1], device=slots.device)
    stays = at < new_lengths[..., None]
    holes = evictions.evicted & stays
    moving = ~evictions.evicted & ~stays & (at < lengths[..., None])
    flat = slots.reshape(-1)
    # As many of each in every head, and in the same order.
    return CacheMoves(flat[true_at(moving, count)], flat[true_at(holes, count)]), new_lengths


def num_moves(evictions: Evictions, new_lengths: torch.Tensor) -> torch.Tensor:
    """How many KVs `schedule_moves` moves, [] int64: nothing waits for it."""
    at = torch.arange(evictions.evicted.shape[-1], device=new_lengths.device)
    return (evictions.evicted & (at < new_lengths[..., None])).sum()
