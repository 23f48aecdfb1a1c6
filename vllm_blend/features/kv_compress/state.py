"""The compression of one request: its state, and its pages as the scheduler sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_blend.features.kv_compress.config import CompressionSettings
from vllm_blend.features.kv_compress.tables import HeadTables
from vllm_blend.request import Request, StateKey


@dataclass
class CompressionState:
    """The state of a request whose KV may be evicted. Its prompt is computed in ordinary blocks; from then on its KV is
    in head pages, in the row `index` of the engine's `HeadTables`."""

    settings: CompressionSettings
    window: int = 0  # how many of the prompt's last queries the metric looks at
    # layer -> first position -> (positions [m], q [m, heads, head_dim]): the window's queries, by step
    queries: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    scores: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [kv_heads, tokens] float32
    window_positions: torch.Tensor | None = None  # [w] int64, the positions of the queries that the scores are of
    num_scored: int = 0  # how many tokens have scores in all layers; 0 while these are not complete
    index: int | None = None  # None: in ordinary blocks
    num_tokens: int = 0  # how many tokens the head pages hold, evicted ones included
    num_prompt_tokens: int = 0  # how many tokens were in the cache when it moved to head pages
    compressed_at: int = 0  # how many tokens it had when it was last compressed, or moved to head pages
    num_compressions: int = 0  # how many compressions have evicted something
    num_summed: int = 0  # how many tokens' queries steps in head pages have added to the sums, or begun to
    is_overdue: bool = False  # it was due for compression, but others were sorted first

    def reset(self) -> None:
        """Forget everything but the settings: the request returns its pages, and is computed again if it goes on."""
        self.queries.clear()
        self.scores.clear()
        self.window_positions = self.index = None
        self.num_scored, self.is_overdue = 0, False
        self.num_tokens = self.num_prompt_tokens = self.compressed_at = self.num_compressions = self.num_summed = 0


COMPRESSION: StateKey[CompressionState] = StateKey("kv_compress")


def in_head_pages(request: Request) -> bool:
    """Return whether each KV head of a request has pages of its own, and its block table is empty."""
    state = COMPRESSION.get(request)
    return state is not None and state.index is not None


class HeadPageTable:
    """The head pages of one request, as the scheduler sees them (a `PageTable`)."""

    def __init__(self, tables: HeadTables, index: int, state: CompressionState) -> None:
        self.tables, self.index, self.state = tables, index, state
        self.blocks: list[int] = []
        self.is_exact = False
        self.num_missing = self.version = 0

    @property
    def max_tokens(self) -> int:
        """Return how many tokens the table could hold if every head were given its share of all free pages."""
        pages_each = self.tables.pool.num_free_pages // self.tables.num_heads
        return self.state.num_tokens + pages_each * self.tables.block_size

    def grow(self, num_tokens: int) -> bool:
        """Extend the tables of all heads to hold `num_tokens`; return False, with nothing taken, if too few pages are
        free."""
        if not self.tables.append(self.index, num_tokens - self.state.num_tokens):
            return False
        self.state.num_tokens = num_tokens
        return True

    def release(self) -> None:
        """Return all pages of all heads."""
        self.tables.close(self.index)
