"""Rotary position embedding, half-split pairs (the NeoX layout that Hugging Face checkpoints use)."""

from __future__ import annotations

import torch

from vllm_blend.ops import cpu
from vllm_blend.ops.bindings import CPUKernels, kernels_for


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_dim] by cos, sin [tokens, rotary_dim / 2] (float32); cast once, at the end.

    A rotary_dim below head_dim leaves the trailing channels as they are.
    """
    kernels = rotary_kernels(x, cos, sin)
    if kernels is not None:
        return cpu.rotary(kernels, x, None, cos, sin)[0]
    return rotary_embedding_reference(x, cos, sin)


def rotary_qk(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rotary_embedding` of q [tokens, heads, head_dim] and k [tokens, kv_heads, head_dim] in one pass."""
    kernels = rotary_kernels(q, cos, sin)
    if kernels is not None and k.dtype == q.dtype and k.shape[::2] == q.shape[::2]:
        q_rotated, k_rotated = cpu.rotary(kernels, q, k, cos, sin)
        assert k_rotated is not None
        return q_rotated, k_rotated
    return rotary_embedding_reference(q, cos, sin), rotary_embedding_reference(k, cos, sin)


def rotary_kernels(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> CPUKernels | None:
    """Return the kernels that can rotate x [tokens, heads, head_dim] by these tables, or None."""
    return kernels_for(x) if tables_fit(x, cos, sin) else None


def tables_fit(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Return whether kernels can rotate x [tokens, heads, head_dim] by these tables, if they know its dtype."""
    return (
        x.dim() == 3
        and cos.dtype == sin.dtype == torch.float32
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.shape == sin.shape
        and cos.shape[0] == x.shape[0]
        and 2 * cos.shape[1] <= x.shape[2]
    )


def rotary_embedding_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    if 2 * half == x.shape[-1]:
        return rotated
    return torch.cat([rotated, x[..., 2 * half :]], -1)
