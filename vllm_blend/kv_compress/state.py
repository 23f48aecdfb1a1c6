"""Where one request stands with its compression."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_blend.kv_compress.config import CompressionSettings


@dataclass
class CompressionState:
    """Of a request whose KV may be evicted, or whose prompt has compressed chunks. Its prompt is computed in ordinary
    blocks, and from the end of that on its KV is in head pages, in the row `index` of the engine's `HeadTables`; with
    compressed chunks it is there from the start."""

    settings: CompressionSettings
    window: int = 0  # of the prompt's last queries, how many the metric looks at
    # layer -> first position -> (positions [m], q [m, heads, head_dim]): the window's queries, by the steps that
    # compute them
    queries: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    scores: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [kv_heads, tokens] float32
    window_positions: torch.Tensor | None = None  # [w] int64, of the queries that the scores are of
    num_scored: int = 0  # tokens that the scores of all layers are of; 0 while they are not complete
    index: int | None = None  # None: in ordinary blocks
    num_tokens: int = 0  # that the head pages hold, the evicted ones counted
    num_prompt_tokens: int = 0  # that were in the cache when it came into head pages
    compressed_at: int = 0  # tokens that it had when it was last compressed, or came into head pages
    num_compressions: int = 0  # that have evicted something
    is_overdue: bool = False  # it was to be compressed, but others were sorted first

    def begin(self, index: int, num_tokens: int) -> None:
        """Its KV is in head pages from now on, or about to be written there."""
        self.index = index
        self.num_tokens = self.num_prompt_tokens = self.compressed_at = num_tokens

    def reset(self) -> None:
        """The request gives its pages back, and is computed again from the start if it goes on."""
        self.queries.clear()
        self.scores.clear()
        self.window_positions = self.index = None
        self.num_scored, self.is_overdue = 0, False
        self.num_tokens = self.num_prompt_tokens = self.compressed_at = self.num_compressions = 0
