"""How ranks share a model: which part of a dimension each has, and where the parts of a checkpoint's tensor go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_blend.distributed.ranks import Ranks


@dataclass(frozen=True)
class Share:
    """The entries `start` to `start + count` - 1 of a dimension of `total`. Those beyond `total` are padding."""

    total: int
    start: int
    count: int

    @classmethod
    def whole(cls, total: int) -> Share:
        return cls(total, 0, total)

    @property
    def is_whole(self) -> bool:
        return self.count == self.total

    @property
    def entries(self) -> slice:
        """Return which entries these are, without padding."""
        return slice(min(self.start, self.total), min(self.start + self.count, self.total))

    @property
    def num_real(self) -> int:
        """Return the number of entries that are no padding."""
        return min(self.start + self.count, self.total) - min(self.start, self.total)

    def times(self, size: int) -> Share:
        """Return the same share of a dimension whose every entry is `size` as long."""
        return Share(self.total * size, self.start * size, self.count * size)


def equal_share(name: str, total: int, ranks: Ranks) -> Share:
    """Return a rank's share of a dimension that is divided equally. Raises ValueError if it cannot be."""
    if total % ranks.size:
        raise ValueError(f"the model's {name} is {total}, which {ranks.size} ranks cannot share equally")
    count = total // ranks.size
    return Share(total, ranks.rank * count, count)


def padded_share(total: int, ranks: Ranks) -> Share:
    """Return a rank's share of a dimension to which padding is added until it can be divided equally."""
    count = -(-total // ranks.size)
    return Share(total, ranks.rank * count, count)


def kv_head_copies(num_kv_heads: int, ranks: Ranks) -> int:
    """Return how many ranks have each KV head: more than one where there are fewer heads than ranks."""
    return max(1, ranks.size // num_kv_heads)


def kv_share(num_kv_heads: int, ranks: Ranks) -> Share:
    """Return a rank's KV heads, which are those of its query heads. Raises ValueError if they cannot be shared out."""
    if ranks.size <= num_kv_heads:
        return equal_share("num_key_value_heads", num_kv_heads, ranks)
    if ranks.size % num_kv_heads:
        raise ValueError(f"the model has {num_kv_heads} KV heads, which {ranks.size} ranks cannot share")
    return Share(num_kv_heads, ranks.rank // kv_head_copies(num_kv_heads, ranks), 1)


@dataclass(frozen=True)
class Layout:
    """Where the parts of a tensor go of which a rank keeps some: each is an index into it, and the memory."""

    shape: tuple[int, ...]  # of the whole tensor
    parts: tuple[tuple[tuple[slice, ...], torch.Tensor], ...]

    def copy_(self, whole: Any) -> None:
        """Copy from a tensor, or from what is sliced like one: only what is kept is read."""
        for index, memory in self.parts:
            memory.copy_(whole[index])


def row_layout(shares: Sequence[Share], memory: torch.Tensor, columns: Share | None = None) -> Layout:
    """Return the layout of matrices (or vectors, without `columns`) one above the other, a share of the rows of each of
    which lies in `memory`, in the same order."""
    parts, above, first = [], 0, 0
    across = () if columns is None else (columns.entries,)
    for share in shares:
        own = share.entries
        index = (slice(above + own.start, above + own.stop), *across)
        parts.append((index, memory[first : first + share.num_real]))
        above, first = above + share.total, first + share.count
    return Layout((above,) if columns is None else (above, columns.total), tuple(parts))
