"""The paged K and V of one layer, as every op and kernel takes them, and what has to fit before it is filled: kernels
take addresses, and trust them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.ops import pointers as to


class PagedKV:
    """Paged K (after RoPE) and V of one layer, each [num_blocks, block_size, kv_heads, head_dim].

    An engine makes one for each layer and keeps it: what kernel calls need to know is read from the tensors once.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self.key, self.value = key, value
        self.num_blocks, self.block_size, self.kv_heads, self.head_dim = key.shape
        self.num_slots = self.num_blocks * self.block_size
        self.dtype = key.dtype
        self.is_alike = key.shape == value.shape and key.dtype == value.dtype
        self.is_contiguous = key.is_contiguous() and value.is_contiguous()
        self.key_address, self.value_address = to.KeyCache(key), to.ValueCache(value)
        self.cuda_view: object = None  # see `cuda_library.cache_view`


def check_chunks_fit(
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    layers: int,
    heads: Sequence[int],
    tables: Sequence[torch.Tensor],
) -> None:
    """Raise ValueError unless K and V of each chunk are [layers, tokens, *heads], heads being [kv_heads, head_dim], and
    each of `tables` (cos, sin, slots) has a row for every token of all chunks. K and V of no layers fit any cache."""
    for k, v in chunks:
        if k.dim() != 4 or k.shape != v.shape or k.shape[0] not in (0, layers) or tuple(k.shape[2:]) != tuple(heads):
            raise ValueError(
                f"chunk K {list(k.shape)} and V {list(v.shape)} do not fit a cache of {layers} layers with {heads[0]} "
                f"KV heads of {heads[1]}: both must be [layers, tokens, kv_heads, head_dim] of that"
            )
    tokens = sum(k.shape[1] for k, _ in chunks)
    if any(len(table) != tokens for table in tables):
        raise ValueError(
            f"cos, sin and slot_mapping have {[len(table) for table in tables]} rows: each must have one for each of "
            f"the chunks' {tokens} tokens"
        )
