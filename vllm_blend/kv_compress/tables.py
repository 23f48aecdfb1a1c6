"""Block tables and lengths by request, layer and KV head: the host decides, the device has a copy.

Every (request, KV head) of a layer is a virtual request of one KV head for attention, with a table and a length of its
own. All KVs of a head lie in the first `length` slots of its pages, in no particular order of position once some have
been evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.core.block_manager import OutOfBlocks
from vllm_blend.kv_compress.device_tables import DeviceTables
from vllm_blend.kv_compress.pages import HeadPagePool
from vllm_blend.ops.host_copy import to_device

PADDING = 0  # the index of a request of one KV, in slot 0, which nobody reads: rows that fill a batch up


@dataclass(frozen=True)
class DecodeTables:
    """Where every (request, head) of a batch has its KVs: row = place in the batch * H + head."""

    block_tables: torch.Tensor  # [L, rows, W] int32 head pages, padded with 0
    positions: torch.Tensor  # [L, rows] int64, length - 1: attention sees every KV
    slots: torch.Tensor  # [L, rows] int64, page * block_size + offset of the newest KV


class HeadTables:
    """Head pages of requests. A request is an `index` from `open` to `close`; 0 is never one, but `PADDING`.

    `lengths` [indices, L, H] int64 and `tables` [indices, L, H, W] int32 are on the host and to be read only. They grow
    by doubling; the device's copy follows with the next `flush`, `decode_batch` or `slots_of`.
    """

    def __init__(
        self,
        pool: HeadPagePool,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        max_len: int,
        device: torch.device,
    ) -> None:
        self.pool, self.block_size, self.max_len, self.device = pool, block_size, max_len, device
        shape = (2, num_layers, num_kv_heads)
        self.lengths = np.zeros(shape, np.int64)
        self.tables = np.zeros((*shape, 1), np.int32)
        self._room = np.zeros(shape, np.int64)  # KVs that the pages of a head hold
        self._longest = np.zeros(2, np.int64)  # the length of a request's longest head
        self.lengths[PADDING] = self._longest[PADDING] = 1
        self._free = [1]
        self._open = np.zeros(2, np.bool_)
        self._on_device = DeviceTables(num_layers, num_kv_heads, device)
        self._on_device.replaced(PADDING, 1)

    def open(self, lengths: np.ndarray) -> int:
        """The index of a new request whose heads have `lengths` [L, H] KVs, with pages for them. Raises OutOfBlocks,
        having taken nothing."""
        longest = int(lengths.max())
        self._check(longest, int(lengths.min()))
        counts = self._pages_for(lengths)
        index = self._free[-1] if self._free else len(self._open)
        pages = self.pool.allocate(int(counts.sum()), owner=index)
        if not self._free:
            self._grow(2 * len(self._open))
        self._free.pop()
        self._open[index] = True
        self._widen(int(counts.max()))
        columns = np.arange(self.tables.shape[3])
        self.tables[index][columns < counts[..., None]] = pages
        self.lengths[index], self._longest[index] = lengths, longest
        self._room[index] = counts * self.block_size
        self._on_device.replaced(index, int(counts.max()))
        return index

    def can_append(self, indices: Sequence[int], n: int | Sequence[int] = 1) -> bool:
        """Whether `append` would find the pages."""
        at, counts = self._batch(indices, n)
        over = self._overflow(at, counts)
        return int(self._pages_for(over[over > 0]).sum()) <= self.pool.num_free_pages

    def append(self, indices: int | Sequence[int], n: int | Sequence[int] = 1) -> bool:
        """Room for n more KVs in every head of every request (n is one number, or one for each), and lengths that
        count them. False, with nothing taken from the pool, when there are too few pages: all or nothing.

        One call for a whole batch takes little more time than one for a request.
        """
        at, counts = self._batch(indices, n)
        if not len(at):
            return True
        self._check(int((self._longest[at] + counts).max()), int(counts.min()))
        over = self._overflow(at, counts).reshape(-1)  # [requests * L * H]
        rows = np.flatnonzero(over > 0)
        if len(rows):
            per_head = self._pages_for(over[rows])
            request = rows // self.num_heads
            try:
                per_request = np.bincount(request, per_head, len(at)).astype(np.int64)
                pages = self.pool.allocate_each(per_request, at)
            except OutOfBlocks:
                return False
            heads = at[request] * self.num_heads + rows % self.num_heads
            room = self._room.reshape(-1)
            first = room[heads] // self.block_size
            room[heads] += per_head * self.block_size
            self._widen(int((first + per_head).max()))
            into = np.repeat(heads, per_head)
            columns = np.repeat(first - (np.cumsum(per_head) - per_head), per_head) + np.arange(len(into))
            self.tables.reshape(-1, self.tables.shape[3])[into, columns] = pages
            self._on_device.changed(into, columns)
        self.lengths[at] += counts[:, None, None]
        self._longest[at] += counts
        self._on_device.added(at.tolist(), counts.tolist())
        return True

    def unappend(self, index: int, n: int) -> None:
        """Drop the newest n KVs of every head: those in the last slots, so nothing may have been evicted since they
        were appended. Pages without any KV left are released."""
        if n < 0 or n > self.lengths[index].min():
            raise ValueError(f"n={n} KVs cannot be dropped where a head has {self.lengths[index].min()}")
        self._resize(index, self.lengths[index] - n)

    def shrink(self, index: int, new_lengths: np.ndarray) -> int:
        """Heads keep their first `new_lengths` [L, H] slots; the number of pages that are released."""
        if (new_lengths < 0).any() or (new_lengths > self.lengths[index]).any():
            raise ValueError(f"new_lengths of index {index} must be between 0 and its lengths")
        return self._resize(index, new_lengths)

    def close(self, index: int) -> int:
        """Release all pages of a request, and how many they are; its index may be another's from now on."""
        if index == PADDING or not self._open[index]:
            raise RuntimeError(f"index {index} is not open")
        freed = self._resize(index, np.zeros_like(self.lengths[index]))
        self._open[index] = False
        self._free.append(index)
        return freed

    def flush(self) -> None:
        """Bring the device up to date, by one small transfer of what has changed; nothing waits for it."""
        self._on_device.flush(self.tables, self.lengths)

    def decode_batch(self, indices: Sequence[int] | np.ndarray) -> DecodeTables:
        """Tables as wide as the longest of the batch needs, and where the newest KV of every head is. `PADDING` may be
        among the indices. Nothing waits for the device; what changes later changes nothing in the tensors returned."""
        self.flush()
        at = np.asarray(indices, np.int64)
        width = max(1, int(self._pages_for(self._longest[at].max(initial=0))))
        on_device = to_device(torch.from_numpy(at.copy()), self.device)
        tables = self._on_device.tables[..., :width].index_select(1, on_device).flatten(1, 2)
        positions = self._on_device.lengths.index_select(1, on_device).flatten(1, 2) - 1
        return DecodeTables(tables, positions, self._slots(tables, positions[..., None]).squeeze(-1))

    def slots_of(self, index: int) -> torch.Tensor:
        """The slots of all KVs of a request, [L, H, longest head] int64, with -1 beyond the length of a head."""
        self.flush()
        at = torch.arange(int(self._longest[index]), device=self.device).expand(*self.lengths.shape[1:], -1)
        slots = self._slots(self._on_device.tables[:, index], at)
        return slots.masked_fill_(at >= self._on_device.lengths[:, index, :, None], -1)

    @property
    def num_heads(self) -> int:
        """KV heads of all layers."""
        return self.lengths[0].size

    def _pages_for(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self.block_size)

    def _check(self, longest: int, shortest: int) -> None:
        if shortest < 0 or longest > self.max_len:
            raise ValueError(f"heads cannot have {shortest} to {longest} KVs: max_len={self.max_len}")

    def _batch(self, indices: int | Sequence[int], n: int | Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        at = np.atleast_1d(np.asarray(indices, np.int64))
        return at, np.broadcast_to(np.asarray(n, np.int64), at.shape)

    def _overflow(self, at: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """By how many KVs the pages of the requests at `at` are too few for `counts` more: [requests, L, H]."""
        return self.lengths[at] - self._room[at] + counts[:, None, None]

    def _slots(self, tables: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Slots of the KVs number `at` [..., n] of heads with `tables` [..., W]; of a head without any, slot 0."""
        at = at.clamp(min=0)
        return tables.gather(-1, at // self.block_size).long() * self.block_size + at % self.block_size

    def _resize(self, index: int, lengths: np.ndarray) -> int:
        width = int(self._room[index].max()) // self.block_size
        counts = self._pages_for(lengths)
        columns = np.arange(width)
        table = self.tables[index, ..., :width]
        dropped = (columns >= counts[..., None]) & (columns < (self._room[index] // self.block_size)[..., None])
        pages = table[dropped]
        self.pool.release(pages)
        table[dropped] = 0
        self.lengths[index], self._longest[index] = lengths, lengths.max()
        self._room[index] = counts * self.block_size
        self._on_device.replaced(index, width)
        return len(pages)

    def _grow(self, num_indices: int) -> None:
        had = len(self._open)
        more = num_indices - had
        for name in ("lengths", "tables", "_room", "_longest", "_open"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self._free.extend(reversed(range(had, num_indices)))

    def _widen(self, width: int) -> None:
        had = self.tables.shape[3]
        if width > had:
            wide = np.zeros((*self.tables.shape[:3], max(width, 2 * had)), np.int32)
            wide[..., :had] = self.tables
            self.tables = wide
