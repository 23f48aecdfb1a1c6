"""What every cached KV of a request is worth right now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from vllm_blend.attention.metadata import LayerCache
from vllm_blend.kv_compress.metrics import BlockView, EvictionMetric, HeadView
from vllm_blend.kv_compress.state import CompressionState
from vllm_blend.ops.host_copy import to_device


class HeadPages(Protocol):
    """K, V, metric and position of every slot of the head pages."""

    head_keys: torch.Tensor  # [pages, block_size, 1, head_dim]
    head_values: torch.Tensor
    metric: torch.Tensor  # [pages, block_size] float32
    position: torch.Tensor  # [pages, block_size] int32


class CompressionMetrics:
    """Reads what prompts were scored and decode steps have added, or scores KVs by what they are."""

    def __init__(self, metric: EvictionMetric, layers: Sequence[LayerCache], pages: HeadPages, scale: float) -> None:
        """`layers`: the ordinary blocks; `scale`: of attention scores."""
        self.metric, self.layers, self.pages, self.scale = metric, layers, pages, scale

    @property
    def keeps_scores(self) -> bool:
        """Whether what a prompt was given holds, and what decode steps add to it; others are scored again."""
        return self.metric.watches or self.metric.accumulates

    def of_prompt(self, state: CompressionState, block_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Scores of a prompt that is complete, in its ordinary blocks: [layers, kv_heads, num_tokens] float32."""
        if self.metric.watches:
            return torch.stack([state.scores[layer] for layer in range(len(self.layers))])
        table = to_device(torch.tensor(block_table, dtype=torch.int32), self.layers[0].key.device)
        views = (
            BlockView(index, len(self.layers), self.scale, layer.key, layer.value, table, num_tokens)
            for index, layer in enumerate(self.layers)
        )
        return torch.stack([self.metric.score(view) for view in views])

    def in_head_pages(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores of the KVs in `slots` [layers, kv_heads, n] int64, -1 for none, at `positions` like them: [layers,
        kv_heads, n] float32."""
        at = slots.clamp(min=0)
        if self.keeps_scores:
            return self.pages.metric.view(-1)[at]
        dim = self.pages.head_keys.shape[-1]
        keys, values = self.pages.head_keys.view(-1, dim), self.pages.head_values.view(-1, dim)
        views = (
            HeadView(
                layer, len(slots), self.scale, keys[at[layer]], values[at[layer]], positions[layer], slots[layer] >= 0
            )
            for layer in range(len(slots))
        )
        return torch.stack([self.metric.score(view) for view in views])

    def rank(self, scores: torch.Tensor, positions: torch.Tensor, state: CompressionState) -> torch.Tensor:
        """What eviction compares; `positions` like `scores`."""
        if not self.keeps_scores:
            return scores
        queries = torch.arange(state.num_prompt_tokens, state.num_tokens, device=positions.device)  # decoded
        if state.window_positions is not None:
            queries = torch.cat([state.window_positions, queries])
        return self.metric.rank(scores, positions, queries)
