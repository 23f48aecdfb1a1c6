"""The device's copy of `HeadTables`: told what changed, it brings that over in one small transfer."""

from __future__ import annotations

import numpy as np
import torch

from vllm_blend.ops.host_copy import to_device


class DeviceTables:
    """`tables` [L, indices, H, W] int32 and `lengths` [L, indices, H] int64 on the device, as the host's were at the
    last `flush`. Both are replaced by larger ones when the host's have grown."""

    def __init__(self, num_layers: int, num_kv_heads: int, device: torch.device) -> None:
        self.device = device
        self.tables = torch.zeros((num_layers, 0, num_kv_heads, 0), dtype=torch.int32, device=device)
        self.lengths = torch.zeros((num_layers, 0, num_kv_heads), dtype=torch.int64, device=device)
        self._whole: dict[int, int] = {}  # index -> how many columns of its tables are to be sent
        self._added: dict[int, int] = {}  # index -> what all its lengths have grown by
        self._entries: list[tuple[np.ndarray, np.ndarray]] = []  # rows (index * L * H + head) and columns of tables

    def replaced(self, index: int, width: int) -> None:
        """All lengths of an index, and the first `width` columns of its tables, may be others now."""
        self._whole[index] = max(width, self._whole.get(index, 1))
        self._added.pop(index, None)

    def added(self, indices: list[int], counts: list[int]) -> None:
        """Every head of indices[i] has counts[i] KVs more (or fewer, where that is negative)."""
        for index, count in zip(indices, counts, strict=True):
            if index not in self._whole:
                self._added[index] = self._added.get(index, 0) + count

    def changed(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Single entries of tables are others now: rows = index * L * H + layer * H + head."""
        if len(rows):
            self._entries.append((rows, columns))

    def flush(self, tables: np.ndarray, lengths: np.ndarray) -> None:
        """Become what the host's `tables` [indices, L, H, W] and `lengths` [indices, L, H] are. Nothing waits."""
        self._grow(tables.shape[0], tables.shape[3])
        if not (self._whole or self._added or self._entries):
            return
        whole, added = list(self._whole), list(self._added)
        flat, pages = self._sparse(tables)
        parts = [np.array(whole, np.int64), np.array(added, np.int64), np.array([*self._added.values()], np.int64)]
        packed = to_device(torch.from_numpy(np.concatenate([*parts, flat, pages])), self.device)
        sizes = [len(whole), len(added), len(added), len(flat), len(flat)]
        whole_at, added_at, counts, flat_at, values = packed.split(sizes)
        if added:
            self.lengths.index_add_(1, added_at, counts[None, :, None].expand(len(self.lengths), -1, self._kv_heads))
        if len(flat):
            self.tables.view(-1)[flat_at] = values.to(torch.int32)
        if whole:
            width = max(self._whole.values())
            rows = np.concatenate([tables[whole, ..., :width], lengths[whole, ..., None].astype(np.int32)], -1)
            sent = to_device(torch.from_numpy(rows), self.device).transpose(0, 1)
            self.tables[:, whole_at, :, :width] = sent[..., :width]
            self.lengths[:, whole_at] = sent[..., width].long()
        self._whole, self._added, self._entries = {}, {}, []

    @property
    def _kv_heads(self) -> int:
        return self.tables.shape[2]

    def _sparse(self, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where changed entries are in the device's tables, and their values now: a place named twice has one value."""
        if not self._entries:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows, columns = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        num_layers, num_indices, _, width = self.tables.shape
        pages = tables.reshape(-1, width)[rows, columns].astype(np.int64)
        index, row = np.divmod(rows, num_layers * self._kv_heads)
        layer, head = np.divmod(row, self._kv_heads)
        return ((layer * num_indices + index) * self._kv_heads + head) * width + columns, pages

    def _grow(self, num_indices: int, width: int) -> None:
        num_layers, had, kv_heads, had_width = self.tables.shape
        if (had, had_width) == (num_indices, width):
            return
        tables = self.tables.new_zeros((num_layers, num_indices, kv_heads, width))
        lengths = self.lengths.new_zeros((num_layers, num_indices, kv_heads))
        tables[:, :had, :, :had_width] = self.tables
        lengths[:, :had] = self.lengths
        self.tables, self.lengths = tables, lengths
