"""What has to fit before stored KV is copied: kernels and copies take addresses, and trust them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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


def check_rows_fit(rows: int, heads: Sequence[int], dtype: torch.dtype, *buffers: torch.Tensor) -> None:
    """Raise ValueError unless so many rows [*heads] of `dtype` can be copied to each buffer, which is contiguous."""
    for buffer in buffers:
        fits = buffer.dim() == 3 and len(buffer) >= rows and tuple(buffer.shape[1:]) == tuple(heads)
        if not (fits and buffer.dtype == dtype and buffer.is_contiguous()):
            raise ValueError(
                f"{rows} rows of {list(heads)} {dtype} do not fit a buffer of {list(buffer.shape)} {buffer.dtype}, "
                "which must be contiguous"
            )
