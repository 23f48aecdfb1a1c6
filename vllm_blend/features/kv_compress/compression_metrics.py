"""The current score of every cached KV of a request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.features.kv_compress.cache_engine import CacheEngine
from vllm_blend.features.kv_compress.metrics import BlockView, EvictionMetric, HeadView
from vllm_blend.features.kv_compress.state import CompressionState
from vllm_blend.ops.e4m3 import gathered, readable
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.paged_kv import PagedKV


class CompressionMetrics:
    """Reads the scores that prompts got and decode steps added to, or scores KVs again, as the metric asks."""

    def __init__(self, metric: EvictionMetric, layers: Sequence[PagedKV], pages: CacheEngine, scale: float) -> None:
        """Score KVs in the ordinary blocks of `layers` and in head `pages`; `scale` is that of attention scores."""
        self.metric, self.layers, self.pages, self.scale = metric, layers, pages, scale

    @property
    def keeps_scores(self) -> bool:
        """Return whether scores are stored and decode steps may add to them; if not, each eviction scores again."""
        return self.metric.watches or self.metric.accumulates

    def prompt_scores(self, state: CompressionState, block_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return the scores of a complete prompt in ordinary blocks: [layers, kv_heads, num_tokens] float32."""
        if self.metric.watches:
            return torch.stack([state.scores[layer] for layer in range(len(self.layers))])
        table = to_device(torch.tensor(block_table, dtype=torch.int32), self.layers[0].key.device)
        views = (
            BlockView(index, len(self.layers), self.scale, layer, table, num_tokens)
            for index, layer in enumerate(self.layers)
        )
        return torch.stack([self.metric.score(view) for view in views])

    def head_page_scores(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the scores of KVs in `slots` [layers, kv_heads, n] int64 (-1 for none), at `positions` of the same
        shape: [layers, kv_heads, n] float32."""
        at = slots.clamp(min=0)
        if self.keeps_scores:
            return self.pages.metric.view(-1)[at]
        dim = self.pages.head_keys.shape[-1]
        keys, values = self.pages.head_keys.view(-1, dim), self.pages.head_values.view(-1, dim)
        views = (
            HeadView(
                layer,
                len(slots),
                self.scale,
                readable(gathered(keys, at[layer])),
                readable(gathered(values, at[layer])),
                positions[layer],
                slots[layer] >= 0,
            )
            for layer in range(len(slots))
        )
        return torch.stack([self.metric.score(view) for view in views])

    def rank(self, scores: torch.Tensor, positions: torch.Tensor, state: CompressionState) -> torch.Tensor:
        """Return the ranks that eviction compares; `positions` have the shape of `scores`."""
        if not self.keeps_scores:
            return scores
        queries = torch.arange(state.num_prompt_tokens, state.num_tokens, device=positions.device)  # decoded
        if state.window_positions is not None:
            queries = torch.cat([state.window_positions, queries])
        return self.metric.rank(scores, positions, queries)
