"""Writing K and V into the paged cache."""

from __future__ import annotations

import torch

from vllm_blend.ops.rotary import rotary_embedding


def reshape_and_cache(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [tokens, kv_heads, head_dim] to slots [tokens] of caches [num_blocks, block_size, kv_heads, head_dim]."""
    key_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    value_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


def place_chunk(
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Place stored chunk KV at its positions in a request, all layers in one pass.

    k (before RoPE), v: [layers, tokens, kv_heads, head_dim]; cos, sin: [tokens, rotary_dim / 2] float32 at the target
    positions; caches: [layers, num_blocks, block_size, kv_heads, head_dim]; slot_mapping: [tokens]. K is rotated in float32
    and cast once: rotating twice in bf16 loses accuracy.
    """
    layers, _, kv_heads, head_dim = k.shape
    rotated = rotary_embedding(k, cos, sin).to(key_cache.dtype)
    key_cache.view(layers, -1, kv_heads, head_dim).index_copy_(1, slot_mapping, rotated)
    value_cache.view(layers, -1, kv_heads, head_dim).index_copy_(1, slot_mapping, v.to(value_cache.dtype))
