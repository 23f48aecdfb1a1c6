"""How far fresh K or V is from what the cache holds for the same tokens."""

from __future__ import annotations

import torch

from vllm_blend.ops import cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.cuda_library import CACHE_DTYPES, DTYPES, check, expect, rows_of, stream_of
from vllm_blend.ops.e4m3 import gathered, widened


def kv_deviation(
    fresh: torch.Tensor, cached: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the squared distance, over heads and channels, of each token's K (or V) from the cached: [tokens] float32.

    CacheBlend's measure (Yao et al., arXiv:2405.16444, section 4.3). fresh: [tokens, kv_heads, head_dim]; cached: K or
    V of a layer [num_blocks, block_size, kv_heads, head_dim]; slot_mapping: [tokens] int64; rows: [n] int64, the tokens
    to compare, for a result [n]. Neither side is copied. Raises ValueError for shapes that do not fit together.
    """
    if slot_mapping.shape != fresh.shape[:1] or fresh.shape[1:] != cached.shape[2:]:
        raise ValueError(
            f"fresh {tuple(fresh.shape)}, slot_mapping {tuple(slot_mapping.shape)} and a cache "
            f"{tuple(cached.shape)} do not fit together"
        )
    if not (cuda.accepts(fresh, fresh.shape[2]) and cuda.fit(fresh.dtype, cached.dtype)):
        return kv_deviation_reference(fresh, cached, slot_mapping, rows)
    rows = None if rows is None else rows.contiguous()
    count = fresh.shape[0] if rows is None else rows.shape[0]
    deviation = torch.empty(count, dtype=torch.float32, device=fresh.device)
    page_stride, slot_stride, head_stride, _ = cached.stride()
    code = cuda.functions().kv_deviation(
        rows_of(to.Input, fresh, "fresh", fresh.dtype), fresh.stride(0),
        expect(to.Cached, cached, "cached", cached.dtype, False),
        expect(to.Slots, slot_mapping, "slot_mapping", torch.int64),
        None if rows is None else expect(to.Rows, rows, "rows", torch.int64), page_stride, slot_stride, head_stride,
        to.Deviation(deviation), count, fresh.shape[1], fresh.shape[2], cached.shape[1], DTYPES[fresh.dtype],
        CACHE_DTYPES[cached.dtype], stream_of(fresh),
    )  # fmt: skip
    check("kv_deviation", code)
    return deviation


def kv_deviation_reference(
    fresh: torch.Tensor, cached: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Run the plain torch twin of `kv_deviation`; float64 stays float64."""
    if rows is not None:
        fresh, slot_mapping = fresh[rows], slot_mapping[rows]
    return squared_distance(fresh, gathered(cached.flatten(0, 1), slot_mapping))


def squared_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return distances [n] of a, b [n, heads, channels], computed in float32, or float64 for float64."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return (widened(a, dtype) - widened(b, dtype)).square().sum((1, 2))
