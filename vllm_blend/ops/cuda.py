"""The CUDA kernels that fill caches, and the small ones (csrc/cuda: cache, load_chunks, mean_shift, norm,
select, fp8, int4).

The rules of `ops.cuda_library` hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch

from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Float, Int, Int64, Pieces, Stream
from vllm_blend.ops.cuda_library import (
    CACHE_DTYPES,
    DTYPES,
    bound,
    cache_dtype_code,
    check,
    expect,
    is_available,
    stream_of,
)
from vllm_blend.ops.e4m3 import E4M3
from vllm_blend.ops.paged_kv import check_chunks_fit

logger = logging.getLogger(__name__)


# fmt: off
class CUDAFunctions(Protocol):
    def place_chunk(
        self, k: to.Key, v: to.Value, layer_stride: Int64, token_stride: Int64, cos: to.Cos, sin: to.Sin,
        key_caches: to.KeyCaches, value_caches: to.ValueCaches, slots: to.Slots, page_stride: Int64, slot_stride: Int64,
        head_stride: Int64, layers: Int, tokens: Int, kv_heads: Int, head_dim: Int, rotary_half: Int, block_size: Int,
        dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def copy_pieces(
        self, pieces: Pieces, count: Int, layer: Int, pinned: Int, k: to.Key, v: to.Value, stream: Stream, /,
    ) -> Int: ...

    def mean_shift_plan(
        self, segments: to.Segments, positions: to.Positions, block_tables: to.BlockTables, slots: to.Slots,
        rows: to.Rows, table_stride: Int64, count: Int, block_size: Int, stream: Stream, /,
    ) -> Int: ...

    def mean_shift(
        self, segments: to.Segments, tiles: to.Tiles, positions: to.Positions, rows: to.Rows, slots: to.Slots,
        k: to.Key, v: to.Value, cos: to.Cos, sin: to.Sin, shift: to.Shift, key_cache: to.KeyCache,
        value_cache: to.ValueCache, k_token_stride: Int64, v_token_stride: Int64, page_stride: Int64,
        slot_stride: Int64, head_stride: Int64, layer: Int, count: Int, num_tiles: Int, kv_heads: Int, head_dim: Int,
        rotary_half: Int, block_size: Int, dtype: Int, cache_dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def reshape_and_cache(
        self, k: to.Key, v: to.Value, k_token_stride: Int64, v_token_stride: Int64, key_cache: to.KeyCache,
        value_cache: to.ValueCache, slots: to.Slots, page_stride: Int64, slot_stride: Int64, head_stride: Int64,
        tokens: Int, kv_heads: Int, head_dim: Int, block_size: Int, dtype: Int, cache_dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def rope_and_cache(
        self, qkv: to.Query, token_stride: Int64, cos: to.Cos, sin: to.Sin, positions: to.Positions, slots: to.Slots,
        key_cache: to.KeyCache, value_cache: to.ValueCache, page_stride: Int64, slot_stride: Int64, head_stride: Int64,
        tokens: Int, q_heads: Int, kv_heads: Int, head_dim: Int, rotary_half: Int, block_size: Int, dtype: Int,
        cache_dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def norm_rope_and_cache(
        self, qkv: to.Query, token_stride: Int64, q_weight: to.QueryWeight, k_weight: to.KeyWeight, eps: Float,
        cos: to.Cos, sin: to.Sin, positions: to.Positions, slots: to.Slots, key_cache: to.KeyCache,
        value_cache: to.ValueCache, page_stride: Int64, slot_stride: Int64, head_stride: Int64, tokens: Int,
        q_heads: Int, kv_heads: Int, head_dim: Int, rotary_half: Int, block_size: Int, dtype: Int, cache_dtype: Int,
        stream: Stream, /,
    ) -> Int: ...

    def rms_norm(
        self, x: to.Input, residual: to.Residual | None, weight: to.Weight, out: to.Out, tokens: Int64, hidden: Int,
        eps: Float, dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def silu_and_mul(
        self, gate_up: to.GateUp, out: to.Out, tokens: Int64, n: Int, dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def few_rows(
        self, x: to.Input, weight: to.Weight, bias: to.Bias | None, out: to.Out, rows: Int, inputs: Int, outs: Int,
        dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def kv_deviation(
        self, fresh: to.Input, token_stride: Int64, cache: to.Cached, slots: to.Slots, rows: to.Rows | None,
        page_stride: Int64, slot_stride: Int64, head_stride: Int64, deviation: to.Deviation, count: Int, kv_heads: Int,
        head_dim: Int, block_size: Int, dtype: Int, cache_dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def quantize_fp8(
        self, x: to.Input, row_stride: Int64, out: to.Out, scales: to.Scales, rows: Int64, n: Int, dtype: Int,
        stream: Stream, /,
    ) -> Int: ...

    def rms_norm_quantize_fp8(
        self, x: to.Input, x_row_scales: to.RowScales | None, x_column_scales: to.ColumnScales | None,
        residual: to.Residual | None, weight: to.Weight, out: to.Out, scales: to.Scales, rows: Int64, n: Int,
        eps: Float, dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def silu_and_mul_quantize_fp8(
        self, gate_up: to.GateUp, row_scales: to.RowScales | None, column_scales: to.ColumnScales | None, out: to.Out,
        scales: to.Scales, rows: Int64, n: Int, dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def int4_tiles_unpack(
        self, tiles: to.Tiles, scales_and_zeros: to.Scales, out: to.Out, features: Int, size: Int, group: Int,
        words: Int, stream: Stream, /,
    ) -> Int: ...
# fmt: on


functions: Callable[[], CUDAFunctions] = bound(CUDAFunctions)


def accepts(tensor: torch.Tensor, *sizes: int) -> bool:
    """Return whether the compiled kernels can work on `tensor`; otherwise the op's torch twin is the one to run.

    `sizes`: numbers of channels that a kernel reads in units of 16 bytes, so it takes multiples of 8 only.
    """
    return tensor.dtype in DTYPES and _accepts(tensor, sizes)


def accepts_pages(pages: torch.Tensor, *sizes: int) -> bool:
    """Return the same of pages, or of chunks, which may be of e4m3 too."""
    return pages.dtype in CACHE_DTYPES and _accepts(pages, sizes)


def fit(dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
    """Return whether the compiled kernels write K and V of `dtype` to pages of `cache_dtype`, and read those with
    queries of `dtype`."""
    return dtype in DTYPES and cache_dtype in (dtype, E4M3)


def _accepts(tensor: torch.Tensor, sizes: Sequence[int]) -> bool:
    if not (tensor.is_cuda and is_available()):
        return False
    for size in sizes:
        if size % 8:
            _warn_of_size(size)
            return False
    return True


@cache
def _warn_of_size(size: int) -> None:
    logger.warning("plain torch runs where %d channels lie together: the CUDA kernels take multiples of 8", size)


def place_chunks(
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pointers: torch.Tensor,
    value_pointers: torch.Tensor,
    layer_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Do `ops.place_chunks` over per-layer caches: k (before RoPE), v [layers, tokens, kv_heads, head_dim] of each, in
    the dtype of the caches;
    cos, sin [all tokens, rotary_dim / 2] float32 at the target positions; key_pointers, value_pointers [layers] int64:
    the addresses of the layers' caches; layer_cache: any layer's key cache, whose shape and strides all share. Negative
    slots are skipped."""
    check_chunks_fit(chunks, len(key_pointers), layer_cache.shape[2:], (cos, sin, slot_mapping))
    if cos.shape != sin.shape or len(value_pointers) != len(key_pointers):
        raise ValueError("cos and sin, and the addresses of key and value caches, must be as many")
    at_cos, at_sin = expect(to.Cos, cos, "cos", torch.float32), expect(to.Sin, sin, "sin", torch.float32)
    at_slots = expect(to.Slots, slot_mapping, "slot_mapping", torch.int64)
    keys = expect(to.KeyCaches, key_pointers, "key_pointers", torch.int64)
    values = expect(to.ValueCaches, value_pointers, "value_pointers", torch.int64)
    page_stride, slot_stride, head_stride, _ = layer_cache.stride()
    half, block_size = cos.shape[-1], layer_cache.shape[1]
    dtype, stream, launch = (
        cache_dtype_code(layer_cache, "layer_cache"),
        stream_of(layer_cache),
        functions().place_chunk,
    )
    start = 0
    for k, v in chunks:  # by addresses: a slice of each tensor for each chunk takes longer than the launch
        layers, tokens, kv_heads, head_dim = k.shape
        if k.stride() != v.stride() or k.stride(2) != head_dim or k.stride(3) != 1:
            raise ValueError("k and v must have equal strides and contiguous heads")
        code = launch(
            expect(to.Key, k, "k", layer_cache.dtype, False), expect(to.Value, v, "v", layer_cache.dtype, False),
            k.stride(0), k.stride(1), at_cos + start * half * 4, at_sin + start * half * 4, keys, values,
            at_slots + start * 8, page_stride, slot_stride, head_stride, layers, tokens, kv_heads, head_dim, half,
            block_size, dtype, stream,
        )  # fmt: skip
        if code:
            check("place_chunk", code)
        start += tokens
