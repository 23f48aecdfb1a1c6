"""From scheduled requests to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.request import Request


@dataclass(frozen=True)
class Span:
    """Which positions of a request a forward pass computes: start .. stop - 1, or the ascending `positions`."""

    request: Request
    start: int
    stop: int
    positions: torch.Tensor | None = None  # [n] int64, on the host or the device


@dataclass(frozen=True)
class Batch:
    input_ids: torch.Tensor  # [tokens] int64
    metadata: AttentionMetadata


def build_batch(spans: Sequence[Span], block_size: int, device: torch.device) -> Batch:
    """Rows of all spans, in order. Every position below a span's `stop` must be filled, or be in the span.

    Positions that are on a GPU stay there, and nothing waits for them: only their number matters on the host.
    """
    tables = _block_tables(spans)
    query_start_loc = [0]
    host = _HostRows()
    pieces: list[torch.Tensor] = []  # [3, rows]: ids, positions, slots
    for span, table in zip(spans, tables, strict=True):
        if span.positions is not None and span.positions.device.type != "cpu":
            pieces += [*host.flush(device), _device_rows(span, table, block_size)]
            count = len(span.positions)
        else:
            count = host.add(span, table, block_size)
        query_start_loc.append(query_start_loc[-1] + count)
    pieces += host.flush(device)
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    metadata = AttentionMetadata(
        positions=packed[1],
        slot_mapping=packed[2],
        block_tables=to_device(torch.from_numpy(tables), device),
        query_start_loc=query_start_loc,
        seq_lens=[span.stop for span in spans],
    )
    return Batch(packed[0], metadata)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device; through pinned memory to a GPU, so that the host does not wait."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def _block_tables(spans: Sequence[Span]) -> np.ndarray:
    """[spans, longest table] int32, padded with block 0."""
    tables = np.zeros((len(spans), max(len(span.request.block_table) for span in spans)), np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.request.block_table)] = span.request.block_table
    return tables


class _HostRows:
    """Rows gathered on the host until they are sent, in one transfer."""

    def __init__(self) -> None:
        self._pieces: list[np.ndarray] = []  # [3, rows] int64: ids, positions, slots
        self._singles: list[tuple[int, int, int]] = []  # decodes in a row: plain integers beat numpy

    def add(self, span: Span, table: np.ndarray, block_size: int) -> int:
        """Append the rows of a span; how many they are."""
        request = span.request
        if span.positions is None and span.stop - span.start == 1:
            block = request.block_table[span.start // block_size]
            token = request.token_slice(span.start, span.stop)[0]
            self._singles.append((token, span.start, block * block_size + span.start % block_size))
            return 1
        positions = np.arange(span.start, span.stop) if span.positions is None else span.positions.numpy()
        slots = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
        self._close_singles()
        self._pieces.append(np.stack([request.token_array(span.stop)[positions], positions, slots]))
        return len(positions)

    def flush(self, device: torch.device) -> list[torch.Tensor]:
        self._close_singles()
        if not self._pieces:
            return []
        rows = self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces, 1)
        self._pieces = []
        return [to_device(torch.from_numpy(np.ascontiguousarray(rows)), device)]

    def _close_singles(self) -> None:
        if self._singles:
            self._pieces.append(np.array(self._singles, np.int64).T)
            self._singles = []


def _device_rows(span: Span, table: np.ndarray, block_size: int) -> torch.Tensor:
    positions = span.positions
    assert positions is not None
    ids = to_device(torch.from_numpy(span.request.token_array(span.stop)), positions.device)
    blocks = to_device(torch.from_numpy(table.astype(np.int64)), positions.device)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    return torch.stack([ids[positions], positions, slots])
