"""The keys and queries over which attention is summed, and the rule of the sum."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SumRule(NamedTuple):
    """The rule by which a key receives attention from a query: p ** power, where p is the softmax of the scaled score.

    A key nearer than `buffer` tokens (key position > query position - buffer) takes part in the softmax but receives
    nothing.
    """

    scale: float
    power: int  # 1 or 2
    buffer: int

    def check(self) -> None:
        """Raise ValueError for a power or a buffer that the ops do not know."""
        if self.power not in (1, 2):
            raise ValueError(f"power must be 1 or 2, got {self.power}")
        if self.buffer < 0:
            raise ValueError(f"buffer must be at least 0, got {self.buffer}")


class WindowKeys(NamedTuple):
    """The places of the first n keys of one prompt, in order of position, and the positions of its window's queries."""

    block_table: torch.Tensor  # [W] int32
    n: int
    query_positions: torch.Tensor  # [w] int64, in any order, each below n


class KeyRows(NamedTuple):
    """The slots of each row's keys and the position of its query. A row is one KV head of one request.

    The keys of a row are the first lengths[row] slots of the pages tables[row], in any order of position. Rows share no
    page but page 0, which pads tables.
    """

    tables: torch.Tensor  # [rows, W] int32
    lengths: torch.Tensor  # [rows] int64
    key_positions: torch.Tensor  # [pages, block_size] int32, of every slot
    query_positions: torch.Tensor  # [rows] int64
