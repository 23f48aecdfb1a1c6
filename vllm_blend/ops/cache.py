"""Writing K and V into the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.ops import constants, cpu, cuda
from vllm_blend.ops.bindings import kernels_for
from vllm_blend.ops.chunk_shapes import check_chunks_fit
from vllm_blend.ops.layernorm import rms_norm
from vllm_blend.ops.rotary import rotary_embedding_reference, rotary_kernels


def reshape_and_cache(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write k, v [tokens, kv_heads, head_dim] to slots [tokens] int64 of caches [num_blocks, block_size, kv_heads,
    head_dim]. Raises IndexError for a slot outside the cache."""
    if cuda.takes(k, k.shape[2]):
        return cuda.reshape_and_cache(k, v, key_cache, value_cache, slot_mapping)
    kernels = kernels_for(k)
    if kernels is not None and _fits(k, v, key_cache, value_cache, slot_mapping):
        return cpu.reshape_and_cache(kernels, k, v, key_cache, value_cache, slot_mapping)
    return reshape_and_cache_reference(k, v, key_cache, value_cache, slot_mapping)


def rotary_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotate q and k, write k and v to the cache, return the rotated q: what a layer does before attention, in one
    pass.

    Shapes as in `rotary_embedding` and `reshape_and_cache`. For a layer in which nobody else wants to see the rotated
    K.
    """
    if cuda.takes(q, q.shape[2], cos.shape[-1]):
        return _rotary_and_cache_cuda(q, k, v, cos, sin, key_cache, value_cache, slot_mapping)
    kernels = rotary_kernels(q, cos, sin)
    if kernels is not None and q.dtype == k.dtype and _fits(k, v, key_cache, value_cache, slot_mapping):
        return cpu.rotary_and_cache(kernels, q, k, v, cos, sin, key_cache, value_cache, slot_mapping)
    reshape_and_cache_reference(rotary_embedding_reference(k, cos, sin), v, key_cache, value_cache, slot_mapping)
    return rotary_embedding_reference(q, cos, sin)


def norm_rotary_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """`rotary_and_cache` of q and k whose heads are normalised first (`rms_norm`, weights [head_dim]), as in Qwen3.

    On a GPU one kernel does it all, and q and k may be overwritten.
    """
    head_dim, half = q.shape[2], cos.shape[-1]
    whole = 2 * half == head_dim and 16 <= head_dim <= 512 and head_dim & (head_dim - 1) == 0
    if whole and len(q) and cuda.takes(q, head_dim, half) and cuda.are_packed(q, k, v):
        rows = constants.arange(len(q), q.device)  # the tables are gathered already: token i has row i of them
        cuda.norm_rope_and_cache(q, k, v, q_weight, k_weight, eps, cos, sin, rows, key_cache, value_cache, slot_mapping)
        return q
    q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return rotary_and_cache(q, k, v, cos, sin, key_cache, value_cache, slot_mapping)


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
    positions; caches: [layers, num_blocks, block_size, kv_heads, head_dim]; slot_mapping: [tokens]. K is rotated in
    float32 and cast once: rotating twice in bf16 loses accuracy.
    """
    place_chunks([(k, v)], cos, sin, key_cache, value_cache, slot_mapping)


def place_chunks(
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`place_chunk` of several chunks, (k, v) each: their tokens follow one another in cos, sin and slot_mapping.

    Raises ValueError, before anything is written, where a chunk does not fit the cache.
    """
    if not chunks:
        return
    if key_cache.shape != value_cache.shape:
        raise ValueError(f"key cache {list(key_cache.shape)} and value cache {list(value_cache.shape)} must be alike")
    check_chunks_fit(chunks, len(key_cache), key_cache.shape[3:], (cos, sin, slot_mapping))
    if cuda.takes(key_cache, key_cache.shape[-1], cos.shape[-1]) and all(k.dtype == key_cache.dtype for k, _ in chunks):
        keys, values = _layer_pointers(key_cache), _layer_pointers(value_cache)
        return cuda.place_chunks(chunks, cos, sin, keys, values, key_cache[0], slot_mapping)
    start = 0
    for k, v in chunks:
        at = slice(start, start + k.shape[1])
        _place_chunk(k, v, cos[at], sin[at], key_cache, value_cache, slot_mapping[at])
        start = at.stop


def _place_chunk(
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    kernels = rotary_kernels(k[0], cos, sin) if len(k) else None
    if kernels is not None and _fits_layers(k, v, key_cache, value_cache, slot_mapping):
        return cpu.place_chunk(kernels, k, v, cos, sin, key_cache, value_cache, slot_mapping)
    return place_chunk_reference(k, v, cos, sin, key_cache, value_cache, slot_mapping)


def _rotary_and_cache_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    tokens = q.shape[0]
    if tokens == 0:
        return q
    if not cuda.are_packed(q, k, v):
        packed = torch.cat([q, k, v], 1)
        q, k, v = packed.split([q.shape[1], k.shape[1], v.shape[1]], 1)
    # The tables are gathered already: token i has row i of them.
    rows = constants.arange(tokens, q.device)
    cuda.rope_and_cache(q, k, v, cos, sin, rows, key_cache, value_cache, slot_mapping)
    return q


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


def reshape_and_cache_reference(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    key_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    value_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)


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
    rotated = rotary_embedding_reference(k.float(), cos, sin).to(key_cache.dtype)
    key_cache.view(layers, -1, kv_heads, head_dim).index_copy_(1, slot_mapping, rotated)
    value_cache.view(layers, -1, kv_heads, head_dim).index_copy_(1, slot_mapping, v.to(value_cache.dtype))


def _fits(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> bool:
    """Whether the kernels can write k, v [tokens, kv_heads, head_dim] to these caches."""
    return (
        cpu.takes_cache(k, key_cache, value_cache)
        and v.dtype == k.dtype
        and k.shape == v.shape
        and key_cache.shape == value_cache.shape
        and k.shape[1:] == key_cache.shape[2:]
        and _slots_fit(slot_mapping, k.shape[0])
    )


def _fits_layers(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> bool:
    """The same for all layers at once; the chunk may be stored in another dtype than the cache's."""
    return (
        k.dtype == v.dtype
        and key_cache.dtype == value_cache.dtype
        and kernels_for(key_cache) is not None
        and k.shape == v.shape
        and key_cache.shape == value_cache.shape
        and k.shape[0] == key_cache.shape[0]
        and k.shape[2:] == key_cache.shape[3:]
        and all(t[0].is_contiguous() for t in (k, v, key_cache, value_cache))
        and _slots_fit(slot_mapping, k.shape[1])
    )


def _slots_fit(slot_mapping: torch.Tensor, tokens: int) -> bool:
    return slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous() and slot_mapping.numel() == tokens
