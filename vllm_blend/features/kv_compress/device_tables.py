"""The device's copy of `HeadTables`: it notes changes, and sends them in one small transfer."""

from __future__ import annotations

import numpy as np
import torch

from vllm_blend.ops.host_copy import to_device


class DeviceTables:
    """`tables` [L, indices, H, W] int32 and `lengths` [L, indices, H] int64 on the device, equal to the host's at the
    last `flush`. Both are replaced by larger ones when the host's have grown."""

    def __init__(self, num_layers: int, num_kv_heads: int, device: torch.device) -> None:
        self.device = device
        self.tables = torch.zeros((num_layers, 0, num_kv_heads, 0), dtype=torch.int32, device=device)
        self.lengths = torch.zeros((num_layers, 0, num_kv_heads), dtype=torch.int64, device=device)
        self._opened: dict[int, int] = {}  # index -> how many columns of its tables to send
        self._shrunk: dict[int, None] = {}  # indices
        self._added: dict[int, int] = {}  # index -> by how much all its lengths have grown
        self._entries: list[tuple[np.ndarray, np.ndarray]] = []  # rows (index * L * H + head) and columns of tables

    def opened(self, index: int, width: int) -> None:
        """Note that everything about an index may have changed: all lengths, and the first `width` table columns."""
        self._opened[index] = max(width, self._opened.get(index, 1))

    def shrunk(self, indices: list[int]) -> None:
        """Note that all lengths of these may have changed."""
        self._shrunk.update(dict.fromkeys(indices))

    def added(self, indices: list[int], counts: list[int]) -> None:
        """Note that every head of indices[i] has counts[i] more KVs."""
        for index, count in zip(indices, counts, strict=True):
            self._added[index] = self._added.get(index, 0) + count

    def changed(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Note that single entries of tables have changed: rows = index * L * H + layer * H + head."""
        if len(rows):
            self._entries.append((rows, columns))

    @torch.inference_mode()  # wherever it is called: some of the tensors are made within an engine's step
    def flush(self, tables: np.ndarray, lengths: np.ndarray) -> None:
        """Copy what has changed of the host's `tables` [indices, L, H, W] and `lengths` [indices, L, H]. Nothing
        waits."""
        self._grow(tables.shape[0], tables.shape[3])
        if self._opened or self._shrunk or self._added or self._entries:
            self._send_numbers(tables, lengths)
        if self._opened:  # last: other changes of these indices may be older
            self._send_rows(tables, lengths)
        self._opened, self._shrunk, self._added, self._entries = {}, {}, {}, []

    def _send_numbers(self, tables: np.ndarray, lengths: np.ndarray) -> None:
        added, shrunk = np.array([*self._added], np.int64), np.array([*self._shrunk], np.int64)
        flat, pages = self._sparse(tables)
        parts = [added, np.array([*self._added.values()], np.int64), shrunk, lengths[shrunk].reshape(-1), flat, pages]
        packed = to_device(np.concatenate(parts), self.device)
        added_at, counts, shrunk_at, shrunk_to, at, values = packed.split([len(part) for part in parts])
        num_layers, _, kv_heads = self.lengths.shape
        if len(added):
            self.lengths.index_add_(1, added_at, counts[:, None].expand(num_layers, -1, kv_heads))
        if len(shrunk):
            self.lengths[:, shrunk_at] = shrunk_to.view(-1, num_layers, kv_heads).transpose(0, 1)
        if len(flat):
            self.tables.view(-1)[at] = values.to(torch.int32)

    def _send_rows(self, tables: np.ndarray, lengths: np.ndarray) -> None:
        at, width = np.array([*self._opened]), max(self._opened.values())
        rows = np.concatenate([tables[at, ..., :width], lengths[at, ..., None].astype(np.int32)], -1)
        sent = to_device(rows, self.device).transpose(0, 1)
        on_device = to_device(at, self.device)
        self.tables[:, on_device, :, :width] = sent[..., :width]
        self.lengths[:, on_device] = sent[..., width].long()

    def _sparse(self, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where changed entries are in the device's tables, and their values now."""
        if not self._entries:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows, columns = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        num_layers, num_indices, kv_heads, width = self.tables.shape
        pages = tables.reshape(-1, width)[rows, columns].astype(np.int64)
        index, head = np.divmod(rows, num_layers * kv_heads)
        layer, head = np.divmod(head, kv_heads)
        return ((layer * num_indices + index) * kv_heads + head) * width + columns, pages

    def _grow(self, num_indices: int, width: int) -> None:
        num_layers, had, kv_heads, had_width = self.tables.shape
        if (had, had_width) == (num_indices, width):
            return
        tables = self.tables.new_zeros((num_layers, num_indices, kv_heads, width))
        lengths = self.lengths.new_zeros((num_layers, num_indices, kv_heads))
        tables[:, :had, :, :had_width] = self.tables
        lengths[:, :had] = self.lengths
        self.tables, self.lengths = tables, lengths
