"""Writing K and V into the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_blend.ops import constants, cpu, cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import CACHE_CODES, DTYPE_CODES, kernels_for, raise_status
from vllm_blend.ops.cuda_library import DTYPES, cache_view, check, expect, rows_for, rows_of, stream_of
from vllm_blend.ops.e4m3 import E4M3, narrowed, widened
from vllm_blend.ops.layernorm import rms_norm
from vllm_blend.ops.paged_kv import PagedKV, check_chunks_fit
from vllm_blend.ops.rotary import rotary_embedding_reference, rotary_kernels, tables_fit


class HeadNorms(NamedTuple):
    """The RMSNorms over each head of q and of k, before the rotation, as in Qwen3."""

    q_weight: torch.Tensor  # [head_dim]
    k_weight: torch.Tensor
    eps: float


def reshape_and_cache(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Write k, v [tokens, kv_heads, head_dim] to slots [tokens] int64 of a cache. Raises IndexError for a slot outside
    it; on a GPU, tokens with negative slots are skipped."""
    if cuda.accepts(k, k.shape[2]):
        view = cache_view(kv)
        code = cuda.functions().reshape_and_cache(
            rows_for(to.Key, k, "k", view), rows_of(to.Value, v, "v", k.dtype), k.stride(0), v.stride(0),
            view.key, view.value, expect(to.Slots, slot_mapping, "slot_mapping", torch.int64),
            view.page_stride, view.slot_stride, view.head_stride, k.shape[0], view.kv_heads, view.head_dim,
            view.block_size, DTYPES[k.dtype], view.dtype, stream_of(k),
        )  # fmt: skip
        return check("reshape_and_cache", code)
    kernels = kernels_for(k)
    if kernels is None or not _fits(k, v, kv, slot_mapping):
        return reshape_and_cache_reference(k, v, kv, slot_mapping)
    k, k_stride = cpu.token_rows(k)
    v, v_stride = cpu.token_rows(v)
    tokens, kv_heads, head_dim = k.shape
    status = kernels.reshape_and_cache(
        to.Key(k), to.Value(v), kv.key_address, kv.value_address, to.Slots(slot_mapping), tokens,
        kv_heads * head_dim, k_stride, v_stride, kv.num_slots, DTYPE_CODES[k.dtype], CACHE_CODES[kv.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "reshape_and_cache")


def rotary_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: PagedKV,
    slot_mapping: torch.Tensor,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Normalise the heads of q and k if there are norms, rotate q and k, write k and v to the cache, return the rotated
    q: what a layer does before attention, in one pass. On a GPU, q and k may be overwritten.

    Shapes as in `rotary_embedding` and `reshape_and_cache`. For a layer in which no hook looks at the rotated K.
    """
    on_gpu = cuda.accepts(q, q.shape[2], cos.shape[-1])
    if norms is not None and not (on_gpu and _norms_in_kernel(q, k, v, cos)):
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
        norms = None
    if on_gpu:
        return _rotary_and_cache_cuda(q, k, v, cos, sin, kv, slot_mapping, norms)
    kernels = rotary_kernels(q, cos, sin)
    if kernels is None or q.dtype != k.dtype or not _fits(k, v, kv, slot_mapping):
        reshape_and_cache_reference(rotary_embedding_reference(k, cos, sin), v, kv, slot_mapping)
        return rotary_embedding_reference(q, cos, sin)
    q, q_stride = cpu.token_rows(q)
    k, k_stride = cpu.token_rows(k)
    v, v_stride = cpu.token_rows(v)
    tokens, heads, head_dim = q.shape
    out = torch.empty_like(q, memory_format=cpu.CONTIGUOUS)
    status = kernels.rope(
        to.QueryOut(out), None, to.Query(q), to.Key(k), to.Value(v), to.Cos(cos), to.Sin(sin), kv.key_address,
        kv.value_address, to.Slots(slot_mapping), tokens, heads, kv.kv_heads, head_dim, cos.shape[1], q_stride,
        k_stride, v_stride, kv.num_slots, DTYPE_CODES[q.dtype], CACHE_CODES[kv.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "rotary_and_cache")
    return out


def _norms_in_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor) -> bool:
    """Return whether the kernel that rotates can normalise too: heads that are rotated whole, by a power of two of 16
    channels."""
    head_dim = q.shape[2]
    whole = 2 * cos.shape[-1] == head_dim and 16 <= head_dim <= 512 and head_dim & (head_dim - 1) == 0
    return whole and are_packed(q, k, v)


def _rotary_and_cache_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: PagedKV,
    slot_mapping: torch.Tensor,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """Rotate q in place, rotate k into its slot (where it lies it stays unrotated) and copy v into its slot."""
    tokens, q_heads, head_dim = q.shape
    if tokens == 0:
        return q
    view = cache_view(kv)
    if not are_packed(q, k, v):
        q, k, v = torch.cat([q, k, v], 1).split([q_heads, k.shape[1], v.shape[1]], 1)
    if not (q.dtype in view.activations and k.shape[1] == view.kv_heads and head_dim == view.head_dim):
        raise ValueError(f"q {tuple(q.shape)} {q.dtype} and {k.shape[1]} KV heads do not fit the cache")
    rows = constants.arange(tokens, q.device)  # the tables are gathered already: token i has row i of them
    if not (
        cos.dtype == sin.dtype == torch.float32
        and slot_mapping.dtype == torch.int64
        and cos.is_contiguous()
        and sin.is_contiguous()
        and slot_mapping.is_contiguous()
        and cos.is_cuda
    ):
        expect(to.Cos, cos, "cos", torch.float32)
        expect(to.Sin, sin, "sin", torch.float32)
        expect(to.Slots, slot_mapping, "slot_mapping", torch.int64)
    functions, qkv, stride = cuda.functions(), to.Query(q), q.stride(0)
    into = (
        to.Cos(cos), to.Sin(sin), to.Positions(rows), to.Slots(slot_mapping), view.key, view.value, view.page_stride,
        view.slot_stride, view.head_stride, tokens, q_heads, view.kv_heads, head_dim, cos.shape[1], view.block_size,
        DTYPES[q.dtype], view.dtype, stream_of(q),
    )  # fmt: skip
    if norms is None:
        code = functions.rope_and_cache(qkv, stride, *into)
    else:
        q_weight = expect(to.QueryWeight, norms.q_weight, "q_weight", q.dtype)
        k_weight = expect(to.KeyWeight, norms.k_weight, "k_weight", q.dtype)
        code = functions.norm_rope_and_cache(qkv, stride, q_weight, k_weight, norms.eps, *into)
    if code:
        check("rotary_and_cache", code)
    return q


def place_chunks(
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Place the stored KV of chunks, (k, v) each, at its positions in a request, all layers in one pass.

    k (before RoPE), v: [layers, tokens, kv_heads, head_dim]; cos, sin: [all tokens, rotary_dim / 2] float32 at the
    target positions, chunk after chunk; caches: [layers, num_blocks, block_size, kv_heads, head_dim]; slot_mapping:
    [all tokens]. K is rotated in float32 and cast once: rotating twice in bf16 loses accuracy. Raises ValueError,
    before anything is written, where a chunk does not fit the cache.
    """
    if not chunks:
        return
    if key_cache.shape != value_cache.shape:
        raise ValueError(f"key cache {list(key_cache.shape)} and value cache {list(value_cache.shape)} must be alike")
    if cuda.accepts_pages(key_cache, key_cache.shape[-1], cos.shape[-1]) and all(
        k.dtype == key_cache.dtype for k, _ in chunks
    ):
        keys, values = _layer_pointers(key_cache), _layer_pointers(value_cache)
        return cuda.place_chunks(chunks, cos, sin, keys, values, key_cache[0], slot_mapping)
    check_chunks_fit(chunks, len(key_cache), key_cache.shape[3:], (cos, sin, slot_mapping))
    start = 0
    for k, v in chunks:
        at = slice(start, start + k.shape[1])
        start = at.stop
        kernels = kernels_for(cos) if len(k) and tables_fit(k[0], cos[at], sin[at]) else None
        if kernels is None or not _fits_layers(k, v, key_cache, value_cache, slot_mapping[at]):
            place_chunk_reference(k, v, cos[at], sin[at], key_cache, value_cache, slot_mapping[at])
            continue
        layers, tokens, kv_heads, head_dim = k.shape
        status = kernels.place_chunk(
            to.Key(k), to.Value(v), to.Cos(cos[at]), to.Sin(sin[at]), to.KeyCache(key_cache),
            to.ValueCache(value_cache), to.Slots(slot_mapping[at]), layers, tokens, kv_heads, head_dim, cos.shape[1],
            k.stride(0), v.stride(0), key_cache.stride(0), value_cache.stride(0),
            key_cache.shape[1] * key_cache.shape[2], CACHE_CODES[k.dtype], CACHE_CODES[key_cache.dtype],
            torch.get_num_threads(),
        )  # fmt: skip
        if status:
            raise_status(status, "place_chunk")


def are_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim] lie side by side, row for
    row."""
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


_POINTERS: dict[tuple[torch.device, int, int, int], torch.Tensor] = {}


def _layer_pointers(caches: torch.Tensor) -> torch.Tensor:
    """Return the addresses of the layers of a cache [layers, ...] as int64 [layers] on its device, made once per cache.

    They are computed there, so nothing waits when a layer is placed alone for the first time. The device is part of the
    key: an address that one GPU has given back may be another's next.
    """
    identity = (caches.device, caches.data_ptr(), caches.shape[0], caches.stride(0))
    if identity not in _POINTERS:
        layers = torch.arange(caches.shape[0], device=caches.device)
        _POINTERS[identity] = caches.data_ptr() + layers * (caches.stride(0) * caches.itemsize)
    return _POINTERS[identity]


def reshape_and_cache_reference(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
    _write(kv.key.view(-1, *k.shape[1:]), 0, slot_mapping, narrowed(k, kv.dtype))
    _write(kv.value.view(-1, *v.shape[1:]), 0, slot_mapping, narrowed(v, kv.dtype))


def place_chunk_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    layers, _, kv_heads, head_dim = k.shape
    rotated = rotary_embedding_reference(widened(k, torch.float32), cos, sin)
    stored = v if v.dtype == value_cache.dtype else narrowed(v, value_cache.dtype)
    for cache, rows in ((key_cache, narrowed(rotated, key_cache.dtype)), (value_cache, stored)):
        _write(cache.view(layers, -1, kv_heads, head_dim), 1, slot_mapping, rows)


def _write(slots: torch.Tensor, dim: int, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy `rows` to the slots `index` along `dim`; both have one dtype. torch copies no e4m3 so, but bytes."""
    if slots.dtype is E4M3:
        slots, rows = slots.view(torch.uint8), rows.view(torch.uint8)
    slots.index_copy_(dim, index, rows)


def _fits(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> bool:
    """Return whether the kernels can write k, v [tokens, kv_heads, head_dim] to this cache."""
    return (
        cpu.accepts_cache(k, kv)
        and v.dtype == k.dtype
        and k.shape == v.shape
        and k.shape[1:] == (kv.kv_heads, kv.head_dim)
        and _slots_fit(slot_mapping, k.shape[0])
    )


def _fits_layers(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> bool:
    """Return the same for all layers at once, whose shapes fit; the chunk may be stored in another dtype than the
    cache's."""
    return (
        k.dtype == v.dtype
        and key_cache.dtype == value_cache.dtype
        and all(t.is_cpu and t.dtype in CACHE_CODES and t[0].is_contiguous() for t in (k, v, key_cache, value_cache))
        and _slots_fit(slot_mapping, k.shape[1])
    )


def _slots_fit(slot_mapping: torch.Tensor, tokens: int) -> bool:
    return slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous() and slot_mapping.numel() == tokens
