"""Bindings of the CUDA kernels that fill caches, and of the small ones (csrc/cuda: cache, load_chunks, norm, select).

The rules of `ops.cuda_library` hold. A paged cache is a pair of tensors [num_blocks, block_size, kv_heads, head_dim] of
the same strides.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import numpy as np
import torch

from vllm_blend.ops.chunk_shapes import check_chunks_fit
from vllm_blend.ops.cuda_library import (
    DTYPES,
    bound,
    cache_view,
    check,
    dtype_code,
    expect,
    is_available,
    rows_of,
    stream_of,
)

logger = logging.getLogger(__name__)

_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES = {
    "vb_place_chunk": (_P, _P, _L, _L, _P, _P, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _I, _I, _P),
    "vb_reshape_and_cache": (_P, _P, _L, _L, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _P),
    "vb_rope_and_cache": (_P, _L, _P, _P, _P, _P, _P, _P, _L, _L, _L, _I, _I, _I, _I, _I, _I, _I, _P),
    "vb_norm_rope_and_cache": (_P, _L, _P, _P, _F, *(_P,) * 6, _L, _L, _L, *(_I,) * 7, _P),
    "vb_rms_norm": (_P, _P, _P, _P, _L, _I, _F, _I, _P),
    "vb_silu_and_mul": (_P, _P, _L, _I, _I, _P),
    "vb_kv_deviation": (_P, _L, _P, _P, _P, _L, _L, _L, _P, _I, _I, _I, _I, _I, _P),
    "vb_copy_pieces": (_P, _I, _I, _I, _P, _P, _P),
}

_functions = bound(_SIGNATURES)


def takes(tensor: torch.Tensor, *sizes: int) -> bool:
    """Whether the compiled kernels can work on `tensor`; otherwise the op's torch twin is the one to run.

    `sizes`: numbers of channels that a kernel reads in units of 16 bytes, so it takes multiples of 8 only.
    """
    if not (tensor.is_cuda and tensor.dtype in DTYPES and is_available()):
        return False
    for size in sizes:
        if size % 8:
            _warn_of_size(size)
            return False
    return True


@cache
def _warn_of_size(size: int) -> None:
    logger.warning("plain torch runs where %d channels lie together: the CUDA kernels take multiples of 8", size)


def cache_pointers(caches: list[torch.Tensor]) -> torch.Tensor:
    """The addresses of per-layer caches on their device, for `place_chunks`. Made once: this copies to the device."""
    return torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64, device=caches[0].device)


def place_chunks(
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pointers: torch.Tensor,
    value_pointers: torch.Tensor,
    layer_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`ops.place_chunks` over per-layer caches: k (before RoPE), v [layers, tokens, kv_heads, head_dim] of each; cos,
    sin [all tokens, rotary_dim / 2] float32 at the target positions; key_pointers, value_pointers from
    `cache_pointers`; layer_cache: any layer's key cache, whose shape and strides all share. Negative slots are
    skipped."""
    check_chunks_fit(chunks, len(key_pointers), layer_cache.shape[2:], (cos, sin, slot_mapping))
    if cos.shape != sin.shape or len(value_pointers) != len(key_pointers):
        raise ValueError("cos and sin, and the addresses of key and value caches, must be as many")
    at_cos, at_sin = expect(cos, "cos", torch.float32), expect(sin, "sin", torch.float32)
    at_slots = expect(slot_mapping, "slot_mapping", torch.int64)
    caches = (
        expect(key_pointers, "key_pointers", torch.int64), expect(value_pointers, "value_pointers", torch.int64)
    )  # fmt: skip
    strides, half, block_size = layer_cache.stride()[:3], cos.shape[-1], layer_cache.shape[1]
    dtype, stream, launch = dtype_code(layer_cache, "layer_cache"), stream_of(layer_cache), _functions().vb_place_chunk
    start = 0
    for k, v in chunks:  # by addresses: a slice of each tensor for each chunk takes longer than the launch
        layers, tokens, kv_heads, head_dim = k.shape
        if k.stride() != v.stride() or k.stride(2) != head_dim or k.stride(3) != 1:
            raise ValueError("k and v must have equal strides and contiguous heads")
        code = launch(
            expect(k, "k", layer_cache.dtype, False), expect(v, "v", layer_cache.dtype, False), k.stride(0),
            k.stride(1), at_cos + start * half * 4, at_sin + start * half * 4, *caches, at_slots + start * 8, *strides,
            layers, tokens, kv_heads, head_dim, half, block_size, dtype, stream,
        )  # fmt: skip
        if code:
            check("place_chunk", code)
        start += tokens


def copy_pieces(table: np.ndarray, layer: int, pinned: bool, k: torch.Tensor, v: torch.Tensor, stream: int) -> None:
    """`ops.copy_pieces`: table: [pieces, 4] int64 as vb_copy_pieces takes it; pinned: whether all pieces are; k, v:
    device buffers that hold their rows, contiguous; stream: a cudaStream_t other than the default one."""
    pointers = (k.data_ptr(), v.data_ptr(), stream)
    code = _functions().vb_copy_pieces(table.ctypes.data, len(table), layer, pinned, *pointers)
    check("copy_pieces", code)


def reshape_and_cache(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`ops.reshape_and_cache`; tokens of k, v may be strided, negative slots are skipped."""
    cache = cache_view(key_cache, value_cache)
    code = _functions().vb_reshape_and_cache(
        rows_of(k, "k", key_cache.dtype), rows_of(v, "v", key_cache.dtype), k.stride(0), v.stride(0), cache.key,
        cache.value, expect(slot_mapping, "slot_mapping", torch.int64), *key_cache.stride()[:3], k.shape[0],
        cache.kv_heads, cache.head_dim, cache.block_size, cache.dtype, stream_of(k),
    )  # fmt: skip
    check("reshape_and_cache", code)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """q [tokens, q_heads, head_dim] and k, v [tokens, kv_heads, head_dim] side by side in a packed projection: q is
    rotated in place, k is rotated into its slot (where it lies it stays unrotated), v is copied into its slot.

    cos, sin: [n, rotary_dim / 2] float32 tables; rows [tokens] int64: the row of the tables for each token.
    """
    cache = cache_view(key_cache, value_cache)
    if q.shape[0] and not are_packed(q, k, v):
        raise ValueError("q, k and v must lie side by side in one buffer [tokens, q, k and v]")
    tokens, q_heads, head_dim = q.shape
    if not (q.dtype == cache.torch_dtype and k.shape[1] == cache.kv_heads and head_dim == cache.head_dim):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and {k.shape[1]} KV heads do not fit the cache")
    if not (
        cos.dtype == sin.dtype == torch.float32
        and rows.dtype == slot_mapping.dtype == torch.int64
        and cos.is_contiguous()
        and sin.is_contiguous()
        and rows.is_contiguous()
        and slot_mapping.is_contiguous()
        and cos.is_cuda
    ):
        for tensor, name in ((cos, "cos"), (sin, "sin")):
            expect(tensor, name, torch.float32)
        for tensor, name in ((rows, "rows"), (slot_mapping, "slot_mapping")):
            expect(tensor, name, torch.int64)
    code = _functions().vb_rope_and_cache(
        q.data_ptr(), q.stride(0), cos.data_ptr(), sin.data_ptr(), rows.data_ptr(), slot_mapping.data_ptr(), cache.key,
        cache.value, cache.page_stride, cache.slot_stride, cache.head_stride, tokens, q_heads, cache.kv_heads,
        head_dim, cos.shape[1], cache.block_size, cache.dtype, stream_of(q),
    )  # fmt: skip
    if code:
        check("rope_and_cache", code)


def norm_rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rows: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """As `rope_and_cache`, with an RMSNorm over each head of q and k before the rotation; weights [head_dim]. Heads are
    rotated whole, by a power of two of 16 channels."""
    cache = cache_view(key_cache, value_cache)
    tokens, q_heads, head_dim = q.shape
    if tokens and not are_packed(q, k, v):
        raise ValueError("q, k and v must lie side by side in one buffer [tokens, q, k and v]")
    if not (q.dtype == cache.torch_dtype and k.shape[1] == cache.kv_heads and head_dim == cache.head_dim):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and {k.shape[1]} KV heads do not fit the cache")
    code = _functions().vb_norm_rope_and_cache(
        q.data_ptr(), q.stride(0), expect(q_weight, "q_weight", q.dtype), expect(k_weight, "k_weight", q.dtype), eps,
        expect(cos, "cos", torch.float32), expect(sin, "sin", torch.float32), expect(rows, "rows", torch.int64),
        expect(slot_mapping, "slot_mapping", torch.int64), cache.key, cache.value, cache.page_stride,
        cache.slot_stride, cache.head_stride, tokens, q_heads, cache.kv_heads, head_dim, cos.shape[1],
        cache.block_size, cache.dtype, stream_of(q),
    )  # fmt: skip
    if code:
        check("norm_rope_and_cache", code)


def are_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim] lie side by side, row for row."""
    head_dim = q.shape[2]
    of_q, of_kv, size = q.shape[1] * head_dim, k.shape[1] * head_dim, q.element_size()
    start, stride = q.data_ptr(), q.stride()
    return (
        stride == k.stride() == v.stride()
        and stride[1:] == (head_dim, 1)
        and k.data_ptr() - start == of_q * size
        and v.data_ptr() - start == (of_q + of_kv) * size
        and k.shape == v.shape
        and q.dtype == k.dtype == v.dtype
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`ops.rms_norm` of x [tokens, n]; with a residual, that of x + residual, and residual is replaced by the sum."""
    dtype = x.dtype
    if not (
        dtype in DTYPES
        and weight.dtype == dtype
        and x.is_contiguous()
        and weight.is_contiguous()
        and weight.is_cuda
        and (residual is None or (residual.dtype == dtype and residual.is_contiguous() and residual.is_cuda))
    ):
        for tensor, name in ((x, "x"), (weight, "weight"), (residual, "residual")):
            if tensor is not None:
                expect(tensor, name, dtype)
        dtype_code(x, "x")
    out = torch.empty_like(x)
    n = x.shape[-1]
    code = _functions().vb_rms_norm(
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
        x.numel() // n, n, eps, DTYPES[dtype], stream_of(x),
    )  # fmt: skip
    if code:
        check("rms_norm", code)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`ops.silu_and_mul` of gate_up [tokens, 2 * n] -> [tokens, n]."""
    shape = gate_up.shape
    n = shape[-1] // 2
    pointer = expect(gate_up, "gate_up", gate_up.dtype)
    out = gate_up.new_empty((*shape[:-1], n))
    code = _functions().vb_silu_and_mul(
        pointer, out.data_ptr(), out.numel() // n, n, dtype_code(gate_up, "gate_up"), stream_of(gate_up)
    )
    if code:
        check("silu_and_mul", code)
    return out


def kv_deviation(
    fresh: torch.Tensor, cached: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """`ops.kv_deviation`; tokens of fresh may be strided."""
    count = fresh.shape[0] if rows is None else rows.shape[0]
    deviation = torch.empty(count, dtype=torch.float32, device=fresh.device)
    wanted = None if rows is None else expect(rows, "rows", torch.int64)
    code = _functions().vb_kv_deviation(
        rows_of(fresh, "fresh", cached.dtype), fresh.stride(0), expect(cached, "cached", cached.dtype, False),
        expect(slot_mapping, "slot_mapping", torch.int64), wanted, *cached.stride()[:3], deviation.data_ptr(), count,
        fresh.shape[1], fresh.shape[2], cached.shape[1], dtype_code(fresh, "fresh"), stream_of(fresh),
    )  # fmt: skip
    check("kv_deviation", code)
    return deviation
