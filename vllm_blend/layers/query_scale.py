"""Queries that grow with their position, so that attention stays sharp over long contexts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class QueryScale:
    """Multiplies the queries at position t by 1 + beta * log(1 + floor(t / original_positions)), as Llama 4 and
    Ministral 3 do: nothing changes within the context that the model was trained on first."""

    beta: float
    original_positions: int

    def __call__(self, q: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Scale q [tokens, heads * head_dim] before RoPE, which keeps factors."""
        at = metadata.positions if metadata.rope_positions is None else metadata.rope_positions
        at = at.view(len(q), -1)[:, :1]  # where each KV head is a request, its rows are of one token
        scale = 1 + self.beta * torch.log1p(torch.floor(at / self.original_positions))
        return q * scale.to(q.dtype)
