"""The host's arrays of decode steps, kept from one step to the next: a step that goes on writes only what changes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_blend.core.pages import PageTable
from vllm_blend.worker.batch import Drawn, Span, decode_row, token_row

IDS, POSITIONS, SLOTS, SOURCES, ROPE_POSITIONS = range(5)


class DecodeRows:
    """Arrays of a step in which every row is one position of a request, for graphs of `size` rows.

    `rows` [5, size] int64: token ids, positions among the keys, slots, sources (see `Drawn.feed`), positions for RoPE.
    `tables` [size, max_blocks] int32: block tables, padded with block 0; its first `unsent` columns are to be sent,
    after which the caller sets it to 0. Rows beyond a batch are those of the padding block.
    """

    def __init__(self, size: int, max_blocks: int, block_size: int) -> None:
        self.rows, self.tables = np.zeros((5, size), np.int64), np.zeros((size, max_blocks), np.int32)
        self.unsent = 0
        self._block_size = block_size
        # Of the last step, if the next one may go on from it: the pages of its rows, the version of each, and starts.
        self._pages: list[PageTable] | None = None
        self._versions: list[int] = []
        self._starts = np.zeros(0, np.int64)
        self._width = 0  # of the part of `tables` that is in use

    def update(self, spans: Sequence[Span], drawn: Drawn) -> None:
        """Write a step's rows: all of them only if requests have come, gone or begun to draft."""
        pages = [span.request.pages for span in spans]
        starts = np.array([span.start for span in spans], np.int64)
        if pages == self._pages and not any(span.drafts for span in spans):
            versions = [page.version for page in self._pages]
            if versions == self._versions and np.array_equal(starts, self._starts + 1):
                self._advance(spans, drawn, starts)
                return
        self._write(spans, drawn, starts)

    def _advance(self, spans: Sequence[Span], drawn: Drawn, starts: np.ndarray) -> None:
        """Go on from the last step, whose requests each have one position more."""
        rows, size, count = self.rows, self._block_size, len(spans)
        self._starts = starts
        rows[POSITIONS, :count] += 1
        rows[ROPE_POSITIONS, :count] += 1
        rows[SLOTS, :count] += 1
        rows[IDS, :count], rows[SOURCES, :count] = _tokens(spans, drawn)
        entered = (starts % size == 0).nonzero()[0].tolist()  # rows that have come to another block
        for row in entered:
            span = spans[row]
            table, index = span.request.block_table, span.start // size
            rows[SLOTS, row] = table[index] * size
            self.tables[row, : len(table)] = table
            self._width = max(self._width, len(table))
        if entered:
            self.unsent = max(self.unsent, self._width)

    def _write(self, spans: Sequence[Span], drawn: Drawn, starts: np.ndarray) -> None:
        """Write every row."""
        rows, tables, size, count = self.rows, self.tables, self._block_size, len(spans)
        missing = [span.num_missing_blocks for span in spans]
        width = max(len(span.request.block_table) for span in spans)
        before = tables[:, : max(width, self._width)].copy()
        rows[:], tables[:, : before.shape[1]] = 0, 0
        rows[SOURCES] = -1
        for row, span, num_missing in zip(tables, spans, missing, strict=False):
            table = span.request.present_blocks() if num_missing else span.request.block_table
            row[: len(table)] = table
        rows[:4, :count] = np.array([decode_row(span, size, drawn) for span in spans], np.int64).T
        rows[ROPE_POSITIONS] = rows[POSITIONS]
        rows[POSITIONS, :count] -= np.array(missing) * size
        self._width = width
        self._remember(spans, starts, is_plain=not any(missing))
        if not np.array_equal(before, tables[:, : before.shape[1]]):
            self.unsent = max(self.unsent, before.shape[1])

    def _remember(self, spans: Sequence[Span], starts: np.ndarray, is_plain: bool) -> None:
        """Let the next step go on from this one, if each row is the next token of a request whose pages tell when an
        entry of their table is replaced: those on another rank have none."""
        pages = [span.request.pages for span in spans]
        known = [page for page in pages if page is not None]
        if is_plain and len(known) == len(pages) and not any(span.drafts for span in spans):
            self._pages, self._versions, self._starts = known, [page.version for page in known], starts
        else:
            self._pages = None


def _tokens(spans: Sequence[Span], drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and sources (see `Drawn.feed`) of spans of one position without drafts."""
    requests = [span.request for span in spans]
    if all(request.num_in_flight for request in requests):  # the usual case while steps are queued ahead
        sources = drawn.rows
        return np.zeros(len(spans), np.int64), np.array([sources[request] for request in requests], np.int64)
    rows = np.array([token_row(span, drawn) for span in spans], np.int64)
    return rows[:, 0], rows[:, 1]
