"""Block tables and lengths by request, layer and KV head: the host owns them, the device has a copy.

For attention, every (request, KV head) of a layer is a virtual request with one KV head, a table and a length of its
own. All KVs of a head lie in the first `length` slots of its pages, in no particular order of position once some have
been evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.core.block_manager import OutOfBlocks
from vllm_blend.features.kv_compress.device_tables import DeviceTables
from vllm_blend.features.kv_compress.pages import HeadPagePool
from vllm_blend.ops.host_copy import to_device

PADDING = 0  # the index of rows that fill up a batch: a request of one KV, in slot 0, whose results are not read

Indices = int | Sequence[int] | np.ndarray
Counts = int | Sequence[int] | np.ndarray


@dataclass(frozen=True)
class DecodeTables:
    """The pages of every (request, head) of a batch: row = place in the batch * H + head."""

    block_tables: torch.Tensor  # [L, rows, W] int32 head pages; 0, or reserved ones, beyond the length
    positions: torch.Tensor  # [L, rows] int64, length - 1: attention sees every KV
    slots: torch.Tensor  # [L, rows] int64, page * block_size + offset of the newest KV


class HeadTables:
    """Head pages of requests. A request has an `index` from `open` to `close`; index 0 is `PADDING`.

    `lengths` [indices, L, H] int64 and `tables` [indices, L, H, W] int32 are on the host and read-only. Both grow by
    doubling, from `num_requests` requests; the device's copy follows with the next `flush`, `decode_batch` or
    `slots_of`. Wherever a method takes an index it takes a batch of distinct ones, in little more time.
    """

    def __init__(
        self,
        pool: HeadPagePool,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        max_len: int,
        device: torch.device,
        num_requests: int = 1,
    ) -> None:
        self.pool, self.block_size, self.max_len, self.device = pool, block_size, max_len, device
        shape = (1 + num_requests, num_layers, num_kv_heads)
        self.lengths = np.zeros(shape, np.int64)
        self.tables = np.zeros((*shape, 1), np.int32)
        self._capacity = np.zeros(shape, np.int64)  # KVs that the pages of a head hold
        self._spare = np.zeros(shape[0], np.int64)  # how many more KVs fit in every head of a request
        self._longest = np.zeros(shape[0], np.int64)  # the length of a request's longest head
        self._open = np.zeros(shape[0], np.bool_)
        self._free = list(range(num_requests, PADDING, -1))
        self._on_device = DeviceTables(num_layers, num_kv_heads, device)
        self.lengths[PADDING] = self._longest[PADDING] = 1
        self._on_device.opened(PADDING, 1)

    @property
    def num_heads(self) -> int:
        """Return the number of KV heads in all layers."""
        return int(self.lengths[0].size)

    def open(self, lengths: np.ndarray) -> int:
        """Take pages for a new request whose heads have `lengths` [L, H] KVs, and return its index. Raises OutOfBlocks,
        having taken nothing."""
        self._check(int(lengths.max()), int(lengths.min()))
        counts = self._pages_for(lengths)
        index = self._free[-1] if self._free else len(self._open)
        pages = self.pool.allocate(int(counts.sum()), owner=index)
        if not self._free:
            self._grow(2 * len(self._open))
        self._free.pop()
        self._open[index] = True
        self._widen(int(counts.max()))
        # Heads take pages in turn, so that pages of a block are equally far from the ends of their heads: heads of one
        # length later free whole blocks at their ends.
        by_column = np.moveaxis(self.tables[index], -1, 0)
        by_column[np.arange(len(by_column))[:, None, None] < counts] = pages
        self._capacity[index] = counts * self.block_size
        self._set_lengths(np.array([index]), lengths[None])
        self._on_device.opened(index, int(counts.max()))
        return index

    def can_append(self, indices: Indices, n: Counts = 1) -> bool:
        """Return whether enough pages are free for `append`."""
        over = self._overflow(*self._find_short(indices, n))
        return int(self._pages_for(over[over > 0]).sum()) <= self.pool.num_free_pages

    def reserve(self, indices: Indices, n: Counts = 1) -> bool:
        """Take pages for n more KVs in every head of every request (n is one number, or one for each). Return False,
        with nothing taken from the pool, if too few are free.

        Use it before appending to a batch one by one: `append` is cheap if the pages are there already. Pages that are
        not appended to stay for the next time, or are freed by `shrink`, `unappend` or `close`.
        """
        at, counts = self._find_short(indices, n)
        over = self._overflow(at, counts).reshape(len(at), self.num_heads)
        request, head = np.nonzero(over > 0)
        if len(request):
            pages_each = self._pages_for(over[request, head])
            per_request = np.bincount(request, pages_each, len(at)).astype(np.int64)
            try:
                pages = self.pool.allocate_each(per_request, at)
            except OutOfBlocks:
                return False
            self._extend(at[request] * self.num_heads + head, pages_each, pages)
            over[request, head] -= pages_each * self.block_size
            self._spare[at] = counts - over.max(1)
        return True

    def append(self, indices: Indices, n: Counts = 1) -> bool:
        """Add n KVs to the length of every head of every request, with pages for them. Return False, with nothing
        changed, if too few are free."""
        if isinstance(indices, int) and isinstance(n, int) and self._spare[indices] >= n and self._open[indices]:
            self._check(int(self._longest[indices]) + n, n)
            self.lengths[indices] += n
            self._longest[indices] += n
            self._spare[indices] -= n
            self._on_device.added([indices], [n])
            return True
        at, counts = self._batch(indices, n)
        self._check(int((self._longest[at] + counts).max(initial=0)), int(counts.min(initial=0)))
        if not self.reserve(at, counts):
            return False
        self.lengths[at] += counts[:, None, None]
        self._longest[at] += counts
        self._spare[at] -= counts
        self._on_device.added(at.tolist(), counts.tolist())
        return True

    def unappend(self, index: int, n: int) -> None:
        """Drop the newest n KVs of every head, which are in the last slots: nothing may have been evicted since they
        were appended. Pages without any KV are released."""
        if n < 0 or n > self.lengths[index].min():
            raise ValueError(f"n={n} KVs cannot be dropped where a head has {self.lengths[index].min()}")
        self.shrink(index, self.lengths[index] - n)

    def shrink(self, indices: Indices, new_lengths: np.ndarray) -> int:
        """Keep the first `new_lengths` [L, H] slots of each head ([indices, L, H] of several), and return the number of
        pages released."""
        at = self._check_open(indices)
        new_lengths = new_lengths.reshape(self.lengths[at].shape)
        if (new_lengths < 0).any() or (new_lengths > self.lengths[at]).any():
            raise ValueError(f"new_lengths of index {indices} must be between 0 and its lengths")
        freed = (self._capacity[at] // self.block_size - self._pages_for(new_lengths)).reshape(len(at), -1)
        request, head = np.nonzero(freed)
        rows, counts = at[request] * self.num_heads + head, freed[request, head]
        into, columns = self._locate(rows, self._capacity.reshape(-1)[rows] // self.block_size - counts, counts)
        tables = self.tables.reshape(-1, self.tables.shape[3])
        self.pool.release(tables[into, columns])
        tables[into, columns] = 0
        self._capacity.reshape(-1)[rows] -= counts * self.block_size
        self._set_lengths(at, new_lengths)
        self._on_device.changed(into, columns)
        self._on_device.shrunk(at.tolist())
        return len(into)

    def close(self, index: int) -> int:
        """Release all pages of a request, and return how many there were. Its index may be used again from now on."""
        self._check_open(index)
        width = int(self._capacity[index].max()) // self.block_size
        table = self.tables[index, ..., :width]
        pages = table[table > 0]
        self.pool.release(pages)
        table[:] = 0
        self._capacity[index] = 0
        self._set_lengths(np.array([index]), np.zeros_like(self.lengths[[index]]))
        self._on_device.opened(index, width)  # zeros, for the next request with this index
        self._open[index] = False
        self._free.append(index)
        return len(pages)

    def flush(self) -> None:
        """Bring the device's copy up to date, by one small transfer of the changes; nothing waits for it."""
        self._on_device.flush(self.tables, self.lengths)

    def decode_batch(self, indices: Sequence[int] | np.ndarray) -> DecodeTables:
        """Return tables as wide as the longest request of the batch needs, and where the newest KV of every head is.
        `PADDING` may be among the indices, more than once. Nothing waits for the device; later changes do not affect
        the returned tensors."""
        self.flush()
        at = self._as_array(indices)
        width = max(1, int(self._pages_for(self._longest[at].max(initial=0))))
        on_device = to_device(at, self.device)
        tables = self._on_device.tables[..., :width].index_select(1, on_device).flatten(1, 2)
        positions = self._on_device.lengths.index_select(1, on_device).flatten(1, 2) - 1
        return DecodeTables(tables, positions, self._slots(tables, positions[..., None]).squeeze(-1))

    def slots_of(self, indices: Indices) -> torch.Tensor:
        """Return the slots of all KVs of a request, [L, H, longest head] int64, with -1 beyond the length of a head; of
        several, [requests, L, H, longest head]. Nothing waits for the device."""
        self.flush()
        at = self._as_array(indices)
        n = int(self._longest[at].max(initial=0))
        on_device = to_device(at, self.device)
        width = max(1, -(-n // self.block_size))
        tables, lengths = (
            self._on_device.tables[..., :width].index_select(1, on_device),
            self._on_device.lengths.index_select(1, on_device),
        )
        rank = torch.arange(n, device=self.device).expand(*lengths.shape, n)
        slots = self._slots(tables, rank).masked_fill_(rank >= lengths[..., None], -1).transpose(0, 1)
        return slots[0] if np.ndim(indices) == 0 else slots

    def lengths_of(self, indices: Indices) -> torch.Tensor:
        """Return the lengths of a request's heads on the device, [L, H] int64; of several, [requests, L, H]."""
        self.flush()
        on_device = to_device(self._as_array(indices), self.device)
        lengths = self._on_device.lengths.index_select(1, on_device).transpose(0, 1)
        return lengths[0] if np.ndim(indices) == 0 else lengths

    def _pages_for(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self.block_size)

    def _check(self, longest: int, shortest: int) -> None:
        if shortest < 0 or longest > self.max_len:
            raise ValueError(f"heads cannot have {shortest} to {longest} KVs: max_len={self.max_len}")

    def _as_array(self, indices: Indices) -> np.ndarray:
        return np.array(indices, np.int64, ndmin=1)

    def _check_open(self, indices: Indices) -> np.ndarray:
        """Return the indices as an array. Raises RuntimeError for one that is not open."""
        at = self._as_array(indices)
        if not self._open[at].all():
            raise RuntimeError(f"index {at[~self._open[at]][0]} is not open")
        return at

    def _batch(self, indices: Indices, n: Counts) -> tuple[np.ndarray, np.ndarray]:
        at = self._check_open(indices)
        return at, np.broadcast_to(np.asarray(n, np.int64), at.shape)

    def _find_short(self, indices: Indices, n: Counts) -> tuple[np.ndarray, np.ndarray]:
        """Return those of the indices whose heads cannot all take n more, and n for each."""
        at, counts = self._batch(indices, n)
        short = self._spare[at] < counts
        return at[short], counts[short]

    def _overflow(self, at: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return how many of `counts` more KVs the pages of the requests at `at` cannot hold: [requests, L, H]."""
        overflow: np.ndarray = self.lengths[at] - self._capacity[at] + counts[:, None, None]
        return overflow

    def _locate(self, rows: np.ndarray, first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and columns of counts[i] entries of the table of head rows[i], from column first[i] on."""
        columns = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        return np.repeat(rows, counts), columns

    def _extend(self, rows: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> None:
        """Append counts[i] of the pages, in order, to the table of head rows[i] = index * num_heads + head."""
        capacity = self._capacity.reshape(-1)
        into, columns = self._locate(rows, capacity[rows] // self.block_size, counts)
        capacity[rows] += counts * self.block_size
        self._widen(int(columns.max()) + 1)
        self.tables.reshape(-1, self.tables.shape[3])[into, columns] = pages
        self._on_device.changed(into, columns)

    def _set_lengths(self, at: np.ndarray, lengths: np.ndarray) -> None:
        self.lengths[at] = lengths
        self._longest[at] = lengths.reshape(len(at), -1).max(1)
        self._spare[at] = (self._capacity[at] - lengths).reshape(len(at), -1).min(1)

    def _slots(self, tables: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        """Return the slots of KVs number `rank` [..., n] of heads with `tables` [..., W]; -1 counts as the first."""
        rank = rank.clamp(min=0)
        return tables.gather(-1, rank // self.block_size).long() * self.block_size + rank % self.block_size

    def _grow(self, num_indices: int) -> None:
        had = len(self._open)
        for name in ("lengths", "tables", "_capacity", "_spare", "_longest", "_open"):
            array = getattr(self, name)
            more = np.zeros((num_indices - had, *array.shape[1:]), array.dtype)
            setattr(self, name, np.concatenate([array, more]))
        self._free.extend(range(num_indices - 1, had - 1, -1))

    def _widen(self, width: int) -> None:
        had = self.tables.shape[3]
        if width > had:
            widest = -(-self.max_len // self.block_size)
            wide = np.zeros((*self.tables.shape[:3], max(width, min(2 * had, widest))), np.int32)
            wide[..., :had] = self.tables
            self.tables = wide
