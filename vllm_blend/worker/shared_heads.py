"""What the heads of other ranks add to what this rank sees: sums over all heads, and choices that all ranks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_blend.distributed.ranks import ONE_RANK, Ranks


@dataclass(frozen=True)
class SharedHeads:
    """Heads of which each rank has an equal share; `kv_copies` ranks have each KV head."""

    ranks: Ranks = ONE_RANK
    kv_copies: int = 1

    def mean(self, part: torch.Tensor) -> torch.Tensor:
        """Return the mean over all query heads, given that over this rank's."""
        return part if self.ranks.size == 1 else self.ranks.sum(part) / self.ranks.size

    def kv_sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all KV heads, given that over this rank's."""
        return part if self.ranks.size == 1 else self.ranks.sum(part) / self.kv_copies

    def all_kv(self, part: torch.Tensor) -> torch.Tensor:
        """Return K or V of all KV heads [n, all heads, head_dim], given that of this rank's."""
        return part if self.ranks.size == 1 else torch.cat(self.ranks.gather_all(part)[:: self.kv_copies], 1)


ALL_HEADS = SharedHeads()


class FailedChoice(Exception):
    """Rank 0 could make no choice, for a reason that it reports."""


def agree(
    ranks: Ranks,
    choose: Callable[[], torch.Tensor],
    device: torch.device,
    look: Callable[[str], object] | None = None,
) -> torch.Tensor:
    """Return rank 0's `choose()`, [n] int64, on every rank, on the device where rank 0 has it: on the host or `device`.

    Only rank 0 calls it, so selectors need not be known to the others, nor agree. `look` is called on the others with
    the name of what `choose` looks at, as each of them has a part of it. Raises on rank 0 what `choose` raises, and
    FailedChoice on the others.
    """
    if ranks.size == 1:
        return choose()
    if ranks.leads:
        try:
            chosen = choose()
        except Exception:
            ranks.tell(None)
            raise
        if chosen.device.type == "cpu":
            ranks.tell(chosen.numpy())
            return chosen
        ranks.tell(len(chosen))
        return ranks.broadcast(chosen)
    while isinstance(told := ranks.hear(), str):
        assert look is not None
        look(told)
    if told is None:
        raise FailedChoice("rank 0 says why")
    if isinstance(told, int):
        return ranks.broadcast(torch.empty(told, dtype=torch.int64, device=device))
    return torch.from_numpy(told)
