"""From scheduled requests to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.ops.host_copy import to_device
from vllm_blend.request import Request


class Span(NamedTuple):
    """The positions of a request that a forward pass computes: start .. stop - 1, or the ascending `positions`.

    `drafts` are guesses at the last positions, beyond the known tokens. A named tuple, as a step makes one for each
    request, and a frozen dataclass takes three times as long to make.
    """

    request: Request
    start: int
    stop: int
    positions: torch.Tensor | None = None  # [n] int64, on the host or the device
    drafts: Sequence[int] = ()

    @property
    def num_missing_blocks(self) -> int:
        """Return the number of blocks of the request that are not on the device; all of them come before the span."""
        pages = self.request.pages
        return 0 if pages is None else pages.num_missing


@dataclass(frozen=True)
class Drawn:
    """The tokens that the step before this one drew. They may still be on their way: the host need not know them."""

    rows: dict[Request, int]
    token_ids: torch.Tensor  # [rows] int64 on the device, negative where no token could be drawn

    def feed(self, input_ids: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        """Return `input_ids` with the drawn tokens put in: `sources` [tokens] int64 names their rows, -1 for none."""
        # A row without a token belongs to a request that is about to fail: any valid id will do.
        drawn = self.token_ids.clamp(min=0)[sources.clamp(min=0)]
        return torch.where(sources < 0, input_ids, drawn)

    def feed_into(self, input_ids: torch.Tensor, sources: torch.Tensor, host_sources: np.ndarray) -> None:
        """Do as `feed` in place, by one kernel if the rows are as they were; `host_sources` are `sources` on the
        host."""
        count = len(self.token_ids)
        if np.array_equal(host_sources[:count], np.arange(count)) and (host_sources[count:] < 0).all():
            torch.clamp(self.token_ids, min=0, out=input_ids[:count])
        else:
            input_ids.copy_(self.feed(input_ids, sources))


NOTHING_DRAWN = Drawn({}, torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Batch:
    input_ids: torch.Tensor  # [tokens] int64
    metadata: AttentionMetadata


def build_batch(spans: Sequence[Span], block_size: int, device: torch.device, drawn: Drawn = NOTHING_DRAWN) -> Batch:
    """Return the rows of all spans, in order. Every position below a span's `stop` must be filled, or be in the span.

    Positions that are on a GPU stay there, and nothing waits for them: only their number matters on the host.
    """
    tables = _block_tables(spans)
    missing = [span.num_missing_blocks * block_size for span in spans]  # keys
    query_start_loc = [0]
    host = _HostRows(drawn)
    pieces: list[torch.Tensor] = []  # [4, rows]: ids, positions, slots, rows of `drawn`
    for span, table in zip(spans, tables, strict=True):
        if span.positions is not None and span.positions.device.type != "cpu":
            pieces += [*host.flush(device), _device_rows(span, table, block_size)]
            count = len(span.positions)
        else:
            count = host.add(span, table, block_size)
        query_start_loc.append(query_start_loc[-1] + count)
    pieces += host.flush(device)
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    positions = packed[1]
    if any(missing):
        tables = _drop_missing_blocks(tables, spans)
        positions = positions - to_device(np.repeat(missing, np.diff(query_start_loc)), device)
    metadata = AttentionMetadata(
        positions=positions,
        slot_mapping=packed[2],
        block_tables=to_device(tables, device),
        query_start_loc=query_start_loc,
        seq_lens=[span.stop - keys for span, keys in zip(spans, missing, strict=True)],
        at_end=tuple(span.positions is None for span in spans),
        rope_positions=packed[1] if any(missing) else None,
    )
    return Batch(drawn.feed(packed[0], packed[3]) if host.feeds else packed[0], metadata)


def single_rows(span: Span) -> list[Span]:
    """Split a span of consecutive positions into spans of one position each."""
    first_draft = span.stop - len(span.drafts)
    return [
        Span(
            span.request,
            at,
            at + 1,
            None,
            span.drafts[at - first_draft : at - first_draft + 1] if at >= first_draft else (),
        )
        for at in range(span.start, span.stop)
    ]


def decode_row(span: Span, block_size: int, drawn: Drawn) -> tuple[int, int, int, int]:
    """Return the token id, position, slot and source (see `Drawn.feed`) of a span of one position."""
    position = span.start
    slot = span.request.block_table[position // block_size] * block_size + position % block_size
    token_id, source = token_row(span, drawn)
    return token_id, position, slot, source


def token_row(span: Span, drawn: Drawn) -> tuple[int, int]:
    """Return the token id and source (see `Drawn.feed`) of a span of one position."""
    request, position = span.request, span.start
    if span.drafts:
        return span.drafts[0], -1
    if position >= request.num_known_tokens:
        return 0, drawn.rows[request]
    return request.token_slice(position, position + 1)[0], -1


def _block_tables(spans: Sequence[Span]) -> np.ndarray:
    """Return the block tables [spans, longest table] int32, padded with block 0."""
    tables = np.zeros((len(spans), max(len(span.request.block_table) for span in spans)), np.int32)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.request.block_table)] = span.request.block_table
    return tables


def _drop_missing_blocks(tables: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Return the tables without the blocks that are missing: attention sees those that are left, one after another."""
    present = np.zeros_like(tables)
    for row, table, span in zip(present, tables, spans, strict=True):
        blocks = span.request.present_blocks() if span.num_missing_blocks else table
        row[: len(blocks)] = blocks
    return present


class _HostRows:
    """Rows gathered on the host until they are sent, in one transfer."""

    def __init__(self, drawn: Drawn) -> None:
        self.feeds = False  # whether any row takes a token that was drawn
        self._drawn = drawn
        self._pieces: list[np.ndarray] = []  # [4, rows] int64: ids, positions, slots, rows of `drawn`
        self._singles: list[tuple[int, int, int, int]] = []  # decodes in a row: plain integers beat numpy

    def add(self, span: Span, table: np.ndarray, block_size: int) -> int:
        """Append the rows of a span, and return their number."""
        request = span.request
        if span.positions is None and span.stop - span.start == 1:
            row = decode_row(span, block_size, self._drawn)
            self.feeds |= row[3] >= 0
            self._singles.append(row)
            return 1
        positions = np.arange(span.start, span.stop) if span.positions is None else span.positions.numpy()
        slots = table[positions // block_size].astype(np.int64) * block_size + positions % block_size
        self._close_singles()
        if span.drafts:
            ids = np.array([*request.token_slice(span.start, span.stop - len(span.drafts)), *span.drafts], np.int64)
        else:
            ids = request.token_array(span.stop)[positions]
        self._pieces.append(np.stack([ids, positions, slots, np.full_like(ids, -1)]))
        return len(positions)

    def flush(self, device: torch.device) -> list[torch.Tensor]:
        self._close_singles()
        if not self._pieces:
            return []
        rows = self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces, 1)
        self._pieces = []
        return [to_device(rows, device)]

    def _close_singles(self) -> None:
        if self._singles:
            self._pieces.append(np.array(self._singles, np.int64).T)
            self._singles = []


def _device_rows(span: Span, table: np.ndarray, block_size: int) -> torch.Tensor:
    positions = span.positions
    assert positions is not None
    ids = to_device(span.request.token_array(span.stop), positions.device)
    blocks = to_device(table.astype(np.int64), positions.device)
    slots = blocks[positions // block_size] * block_size + positions % block_size
    return torch.stack([ids[positions], positions, slots, torch.full_like(slots, -1)])
