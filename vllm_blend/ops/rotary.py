"""Rotary position embedding, half-split pairs (the NeoX layout that Hugging Face checkpoints use)."""

from __future__ import annotations

import torch


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by cos, sin [tokens, rotary_dim / 2] (float32); cast once, at the end.

    A rotary_dim below head_dim leaves the trailing channels as they are.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat([rotated, x[..., 2 * half :]], -1)
