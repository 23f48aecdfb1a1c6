"""Page tables: the pages that hold the KV of one request, whatever kind of pages these are.

The scheduler grows, shares and releases pages through `PageTable` alone. `BlockTable` is the ordinary kind. A feature
that lays KV out differently gives a running request a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from vllm_blend.core.block_manager import BlockManager

MISSING = 0  # the entry of a block whose content is off the device; the manager never gives out block 0


class PageTable(Protocol):
    """The pages of one request, from the step that first gives it pages until it returns them."""

    blocks: list[int]  # the ordinary blocks, in order of position; empty for a table of another kind
    is_exact: bool  # whether they hold what plain prefill puts there: only then may requests share them by content
    num_missing: int  # how many entries of `blocks` are MISSING
    version: int  # another one after entries of `blocks` were replaced; those that are added behind them do not count

    @property
    def max_tokens(self) -> int:
        """Return how many tokens the table could hold if it were given every free page."""
        ...

    def grow(self, num_tokens: int) -> bool:
        """Extend the table to hold `num_tokens`; return False, with nothing taken, if too few pages are free."""
        ...

    def release(self) -> None:
        """Return all pages. The table is not used again."""
        ...


class BlockTable:
    """Blocks of a `BlockManager`. `shared` blocks, which the table starts with, have been taken for it already."""

    def __init__(self, manager: BlockManager, shared: Iterable[int] = ()) -> None:
        self.manager, self.blocks = manager, list(shared)
        self.is_exact = True
        self.num_missing = self.version = 0

    @property
    def max_tokens(self) -> int:
        """Return how many tokens the table could hold if it were given every free block."""
        return (len(self.blocks) + self.manager.num_free_blocks) * self.manager.block_size

    def grow(self, num_tokens: int) -> bool:
        """Extend the table to hold `num_tokens`; return False, with nothing taken, if too few blocks are free."""
        if num_tokens <= len(self.blocks) * self.manager.block_size:
            return True
        needed = self.manager.blocks_for(num_tokens) - len(self.blocks)
        if needed > self.manager.num_free_blocks:
            return False
        self.blocks.extend(self.manager.allocate(needed))
        return True

    def release(self) -> None:
        """Return all blocks that are on the device."""
        self.manager.release([block for block in self.blocks if block != MISSING])
