from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paged import DTYPES, ISAS, assert_near, kernels
from vllm_blend import ops
from vllm_blend.ops.cache import place_chunk_reference, reshape_and_cache_reference
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.ops.rotary import rotary_embedding_reference

TOKENS = st.integers(0, 40)
HEADS = st.integers(1, 8)
HEAD_DIMS = st.sampled_from([2, 16, 24, 64, 80, 96, 128, 256])


def tables(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(tokens, half) * 7
    return angles.cos(), angles.sin()


def tokens_of(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, strided: bool) -> torch.Tensor:
    return torch.randn(tokens, heads + strided, head_dim).to(dtype)[:, :heads]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The twin in float64."""
    half = cos.shape[-1]
    x, cos, sin = x.double(), cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


def new_caches(blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    key = torch.randn(blocks, 8, kv_heads, head_dim).to(dtype)
    return key, torch.randn_like(key)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(tokens=TOKENS, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIMS, partial=st.booleans(), strided=st.booleans())
def test_rotary(
    isa: str, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, partial: bool, strided: bool
) -> None:
    cos, sin = tables(tokens, head_dim // 4 if partial else head_dim // 2)
    q, k = (tokens_of(tokens, h, head_dim, dtype, strided) for h in (heads, kv_heads))
    with kernels(isa):
        alone = ops.rotary_embedding(q, cos, sin)
        both = ops.rotary_qk(q, k, cos, sin)
    assert_near(alone, rotated(q, cos, sin), dtype)
    assert torch.equal(both[0], alone)
    assert_near(both[1], rotated(k, cos, sin), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(tokens=TOKENS, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIMS, strided=st.booleans())
def test_writing_to_the_cache(
    isa: str, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, strided: bool
) -> None:
    """Both ways write the right slots and nothing else."""
    cos, sin = tables(tokens, head_dim // 2)
    q, k, v = (tokens_of(tokens, h, head_dim, dtype, strided) for h in (heads, kv_heads, kv_heads))
    key_cache, value_cache = new_caches(7, kv_heads, head_dim, dtype)
    slots = torch.randperm(56)[:tokens]

    plain, twin, fused = (PagedKV(key_cache.clone(), value_cache.clone()) for _ in range(3))
    reshape_and_cache_reference(k, v, twin, slots)
    with kernels(isa):
        ops.reshape_and_cache(k, v, plain, slots)
        q_rotated = ops.rotary_and_cache(q, k, v, cos, sin, fused, slots)
        q_expected, k_expected = ops.rotary_qk(q, k, cos, sin)
    assert torch.equal(plain.key, twin.key)
    assert torch.equal(plain.value, twin.value)
    assert torch.equal(q_rotated, q_expected)
    reshape_and_cache_reference(k_expected, v, PagedKV(key_cache, value_cache), slots)
    assert torch.equal(fused.key, key_cache)
    assert torch.equal(fused.value, value_cache)


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=8, deadline=None)
@given(layers=st.integers(1, 3), tokens=st.integers(0, 40), head_dim=HEAD_DIMS, interleaved=st.booleans())
def test_place_chunk(
    isa: str, source: torch.dtype, target: torch.dtype, layers: int, tokens: int, head_dim: int, interleaved: bool
) -> None:
    cos, sin = tables(tokens, head_dim // 2)
    k, v = torch.randn(2, layers, tokens, 2, head_dim).to(source)
    if interleaved:  # K and V of a layer side by side, so that neither is contiguous as a whole
        key_cache, value_cache = torch.randn(layers, 2, 7, 8, 2, head_dim).to(target).unbind(1)
    else:
        key_cache, value_cache = torch.randn(2, layers, 7, 8, 2, head_dim).to(target)
    slots = torch.randperm(56)[:tokens]
    untouched = torch.ones(56, dtype=torch.bool)
    untouched[slots] = False
    before = key_cache.clone(), value_cache.clone()
    with kernels(isa):
        ops.place_chunks([(k, v)], cos, sin, key_cache, value_cache, slots)
    keys, values = (c.flatten(1, 2) for c in (key_cache, value_cache))
    assert_near(keys[:, slots], rotated(k, cos, sin), target)
    assert torch.equal(values[:, slots], v.to(target))
    assert torch.equal(keys[:, untouched], before[0].flatten(1, 2)[:, untouched])
    assert torch.equal(values[:, untouched], before[1].flatten(1, 2)[:, untouched])


@pytest.mark.parametrize("isa", ISAS)
def test_many_tokens_at_once(isa: str) -> None:
    """Enough elements for several threads, in every kernel of this file."""
    k, v = torch.randn(2, 3, 500, 2, 64)
    cos, sin = tables(500, 32)
    slots = torch.randperm(512)[:500]
    placed, wanted = torch.zeros(2, 2, 3, 64, 8, 2, 64)
    place_chunk_reference(k, v, cos, sin, wanted[0], wanted[1], slots)
    with kernels(isa):
        ops.place_chunks([(k, v)], cos, sin, placed[0], placed[1], slots)
        torch.testing.assert_close(placed, wanted)
        torch.testing.assert_close(ops.rotary_embedding(k[0], cos, sin), rotary_embedding_reference(k[0], cos, sin))
        ops.reshape_and_cache(k[0], v[0], PagedKV(placed[0, 0], placed[1, 0]), slots)
    assert torch.equal(placed[0, 0].flatten(0, 1)[slots], k[0])


@pytest.mark.parametrize("slot", [-1, 56, 10**9])
@pytest.mark.parametrize("isa", ISAS)
def test_slot_outside_the_cache_is_an_error(isa: str, slot: int) -> None:
    k = torch.randn(3, 2, 64)
    cos, sin = tables(3, 32)
    key_cache, value_cache = new_caches(7, 2, 64, torch.float32)
    before = key_cache.clone()
    slots = torch.tensor([0, slot, 2])
    with kernels(isa):
        with pytest.raises(IndexError, match="slot"):
            ops.reshape_and_cache(k, k, PagedKV(key_cache, value_cache), slots)
        with pytest.raises(IndexError, match="slot"):
            ops.rotary_and_cache(k, k, k, cos, sin, PagedKV(key_cache, value_cache), slots)
        with pytest.raises(IndexError, match="slot"):
            ops.place_chunks([(k[None], k[None])], cos, sin, key_cache[None], value_cache[None], slots)
    assert torch.equal(key_cache, before)
