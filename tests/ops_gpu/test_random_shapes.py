"""Kernels that read and write pages, against twins in float64: random shapes, layouts of pages, heads and dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops_gpu import cases
from tests.ops_gpu.pages import (
    HEAD_DIMS,
    TOKENS,
    Shape,
    addresses,
    assert_only_these_written,
    at,
    make_cache,
    random,
    random_slots,
    shapes,
)
from tests.ops_gpu.reference import DEVICE, TOLERANCE, assert_close
from tests.ops_gpu.test_cache import rotate64, tables
from vllm_blend import ops
from vllm_blend.ops import cuda, cuda_attention
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

examples = settings(
    max_examples=cases.examples(60), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
SEEDS = st.integers(0, 2**16)
BLOCKS = 9


def half_of(shape: Shape, share: int) -> int:
    """Rotated pairs: half of the head's channels, or a quarter of them where that is a whole number of 16 bytes."""
    return shape.head_dim // 4 if share == 4 and shape.head_dim % 32 == 0 else shape.head_dim // 2


@examples
@given(shape=shapes, tokens=TOKENS, skipped=st.booleans(), seed=SEEDS)
def test_reshape_and_cache(shape: Shape, tokens: int, skipped: bool, seed: int) -> None:
    """k and v are parts of a packed projection; what a skipped token holds goes nowhere."""
    packed = random(tokens, shape.group + 2, shape.kv_heads, shape.head_dim, dtype=shape.dtype, seed=seed)
    k, v = packed[:, -2], packed[:, -1]
    caches = make_cache(shape, BLOCKS)
    slots = random_slots(tokens, BLOCKS * shape.block_size, seed, skipped)
    ops.reshape_and_cache(k, v, PagedKV(*caches), slots)
    kept = slots >= 0
    for cache, rows in zip(caches, (k, v), strict=True):
        assert torch.equal(at(cache, slots[kept]), rows[kept])
        assert_only_these_written(cache, slots[kept])


@examples
@given(shape=shapes, tokens=TOKENS, share=st.sampled_from([2, 4]), skipped=st.booleans(), seed=SEEDS)
def test_rope_and_cache(shape: Shape, tokens: int, share: int, skipped: bool, seed: int) -> None:
    """The packed projection has something beside it in its buffer."""
    half, heads = half_of(shape, share), shape.q_heads + 2 * shape.kv_heads
    buffer = random(tokens, heads + 1, shape.head_dim, dtype=shape.dtype, seed=seed)
    before = buffer.clone()
    cos, sin = tables(500, half)
    positions = torch.randperm(500, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)[:tokens]
    caches = make_cache(shape, BLOCKS)
    slots = random_slots(tokens, BLOCKS * shape.block_size, seed, skipped)
    parts = [shape.q_heads, shape.kv_heads, shape.kv_heads]
    q, k, v = buffer[:, :heads].split(parts, 1)
    ops.rotary_and_cache(q, k, v, cos[positions], sin[positions], PagedKV(*caches), slots)
    q, k, v = before[:, :heads].split(parts, 1)
    kept = slots >= 0
    rotated = [rotate64(x, cos[positions], sin[positions]) for x in (q, k)]
    assert_close(buffer[:, : shape.q_heads], rotated[0], TOLERANCE[shape.dtype])
    assert_close(at(caches[0], slots[kept]), rotated[1][kept], TOLERANCE[shape.dtype])
    assert torch.equal(at(caches[1], slots[kept]), v[kept])
    assert torch.equal(buffer[:, shape.q_heads :], before[:, shape.q_heads :]), "only q changes in place"
    for cache in caches:
        assert_only_these_written(cache, slots[kept])


@examples
@given(
    shape=shapes,
    tokens=TOKENS,
    layers=st.integers(0, 4),
    share=st.sampled_from([2, 4]),
    skipped=st.booleans(),
    seed=SEEDS,
)
def test_place_chunk(shape: Shape, tokens: int, layers: int, share: int, skipped: bool, seed: int) -> None:
    """A stretch of a longer chunk, into some layers; rounded once, from float32."""
    half = half_of(shape, share)
    stored = random(2, layers, tokens + 5, shape.kv_heads, shape.head_dim, dtype=shape.dtype, seed=seed)
    k, v = stored[:, :, 3 : 3 + tokens]
    caches = [make_cache(shape, BLOCKS) for _ in range(max(layers, 1))]
    keys, values = (list(each) for each in zip(*caches, strict=True))
    slots = random_slots(tokens, BLOCKS * shape.block_size, seed, skipped)
    at_positions = torch.randint(1000, (tokens,), generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    cos, sin = (table[at_positions] for table in tables(1000, half))
    pointers = addresses(keys), addresses(values)
    cuda.place_chunks([(k, v)], cos, sin, *pointers, keys[0], slots)
    kept = slots >= 0
    for layer in range(layers):
        expected = rotate64(k[layer], cos, sin)[kept]
        assert_close(at(keys[layer], slots[kept]), expected, TOLERANCE[shape.dtype])
        assert_close(at(keys[layer], slots[kept]), expected.to(shape.dtype), TOLERANCE[shape.dtype] / 20)
        assert torch.equal(at(values[layer], slots[kept]), v[layer][kept])
    for key, value in caches[:layers]:
        assert_only_these_written(key, slots[kept])
        assert_only_these_written(value, slots[kept])


@examples
@given(shape=shapes, tokens=TOKENS, some=st.booleans(), seed=SEEDS)
def test_kv_deviation(shape: Shape, tokens: int, some: bool, seed: int) -> None:
    packed = random(tokens, shape.group + 2, shape.kv_heads, shape.head_dim, dtype=shape.dtype, seed=seed)
    fresh, cached = packed[:, -1], random(tokens, shape.kv_heads, shape.head_dim, dtype=shape.dtype, seed=seed + 1)
    _, value = make_cache(shape, BLOCKS)
    slots = random_slots(tokens, BLOCKS * shape.block_size, seed, skipped=False)
    value[slots // shape.block_size, slots % shape.block_size] = cached
    expected = (fresh.double() - cached.double()).square().sum((1, 2))
    rows = torch.arange(seed % 3, max(tokens, seed % 3), 2, device=DEVICE) if some else None
    assert_close(ops.kv_deviation(fresh, value, slots, rows), expected if rows is None else expected[rows], 1e-5)


@examples
@given(
    shape=shapes,
    length=st.integers(1, 700),
    rows=st.sampled_from([0, 1, 3, 17, 64, 65]),
    window=st.sampled_from([None, None, 1, 50]),
    variant=st.sampled_from(["auto", "mma"]),
    seed=SEEDS,
)
def test_attention_mass(shape: Shape, length: int, rows: int, window: int | None, variant: str, seed: int) -> None:
    """Rows stand at any ascending positions: keys behind a row, and slots behind the context, get nothing."""
    rows = min(rows, length)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    key, value = make_cache(shape, -(-700 // shape.block_size) + 1)
    table = torch.randperm(key.shape[0], generator=generator, device=DEVICE)[: -(-length // shape.block_size)]
    every = torch.arange(length, device=DEVICE)
    k = random(length, shape.kv_heads, shape.head_dim, dtype=shape.dtype, seed=seed)
    key[table[every // shape.block_size], every % shape.block_size] = k
    q = random(rows, shape.q_heads, shape.head_dim, dtype=shape.dtype, seed=seed + 1) * 1.5
    positions = torch.randperm(length, generator=generator, device=DEVICE)[:rows].sort().values
    scale = shape.head_dim**-0.5
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(shape.group, 1)) * scale
    seen = every[None] <= positions[:, None]
    if window is not None:
        seen &= every[None] > positions[:, None] - window
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    expected = (scores - lse[..., None]).exp().sum(1).unflatten(0, (shape.kv_heads, shape.group)).sum(1) / shape.q_heads
    mass = torch.full((shape.kv_heads, length), 0.25, device=DEVICE)  # as another layer may have left it
    pages = table.to(torch.int32)
    lse = lse.T.float().contiguous()
    cuda_attention.attention_mass(q, lse, positions, PagedKV(key, value), pages, mass, scale, window, variant)
    assert_close(mass - 0.25, expected, 3e-3 if shape.dtype == torch.bfloat16 else 2e-3)
    last = int(positions[-1]) + 1 if rows else 0
    assert torch.equal(mass[:, last:], torch.full_like(mass[:, last:], 0.25))


@examples
@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    heads=st.integers(1, 40),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    tokens=TOKENS,
    seed=SEEDS,
)
def test_merge_states(head_dim: int, heads: int, dtype: torch.dtype, tokens: int, seed: int) -> None:
    """Sums of exponentials that differ by many orders of magnitude; states that saw nothing hold NaN."""
    outs = [random(tokens, heads, head_dim, dtype=dtype, seed=seed + i) for i in (0, 1)]
    lses = [random(tokens, heads, dtype=torch.float32, seed=seed + i) * 15 for i in (2, 3)]
    empty = [random(tokens, heads, dtype=torch.float32, seed=seed + i) > 1 for i in (4, 5)]
    for out, lse, nothing in zip(outs, lses, empty, strict=True):
        out[nothing] = torch.nan
        lse[nothing] = -torch.inf
    out, lse = ops.merge_states(outs[0], lses[0], outs[1], lses[1])
    expected_lse = torch.logaddexp(lses[0].double(), lses[1].double())
    weights = [(each.double() - expected_lse).exp().nan_to_num(0.0) for each in lses]
    parts = [w[..., None] * o.double().nan_to_num(0.0) for w, o in zip(weights, outs, strict=True)]
    expected = parts[0] + parts[1]
    both = empty[0] & empty[1]
    assert_close(out, expected.masked_fill(both[..., None], 0.0), TOLERANCE[dtype])
    assert torch.equal(lse.isneginf(), both)
    assert_close(lse[~both], expected_lse[~both], 1e-6)
