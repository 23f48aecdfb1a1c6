"""The ops as layers call them, on a GPU: whatever runs, kernel or plain torch, agrees with a twin in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ops_gpu.pages import Shape, assert_only_these_written, at, make_cache, poison, random, random_slots
from tests.ops_gpu.reference import DEVICE, TOLERANCE, assert_close
from tests.ops_gpu.test_cache import rotate64
from vllm_blend import ops
from vllm_blend.ops import cuda
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

LIMIT = {**TOLERANCE, torch.float32: 1e-6}
DTYPES = list(LIMIT)
HEAD_DIMS = [16, 24, 64, 128]  # 24: the rotated half is no multiple of 8
TOKENS = [0, 1, 65]


@pytest.fixture(autouse=True)
def any_warning_is_new() -> Iterator[None]:
    cuda._warn_of_size.cache_clear()
    yield
    cuda._warn_of_size.cache_clear()


def tables(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(tokens, half, generator=torch.Generator(DEVICE).manual_seed(tokens), device=DEVICE) * 7
    return angles.cos(), angles.sin()


def rms_norm64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x64 = x.double()
    normed = x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return normed.to(x.dtype).double() * weight.double()


def run_poisoned(op: Callable[[], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what `op` returns, having written over NaN: a kernel makes no other tensor, plain torch may."""
    address = poison(shape, dtype)
    out = op()
    if out.numel() > 0 and cuda.accepts(out, shape[-1]):
        assert out.data_ptr() == address, "it was not given what was poisoned"
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (33, 4096), (33, 20), (9, 3, 128), (1, 2, 80)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows are normalised, and so are heads that are a part of a packed projection, as in Qwen3."""
    wide = random(*shape[:-2], shape[-2] + 3, shape[-1], dtype=dtype, seed=1)
    x = wide[..., : shape[-2], :]
    weight = random(shape[-1], dtype=dtype, seed=2)
    out = ops.rms_norm(x, weight, 1e-6)
    assert_close(out, rms_norm64(x, weight), LIMIT[dtype])
    if len(shape) == 2:
        out = run_poisoned(lambda: ops.rms_norm(x, weight, 1e-6), shape, dtype)
        assert_close(out, rms_norm64(x, weight), LIMIT[dtype])
        residual = random(*shape, dtype=dtype, seed=3)
        total = x + residual
        normed, summed = ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(summed, total)
        assert_close(normed, rms_norm64(total, weight), LIMIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 16), (33, 6144), (5, 20)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = random(shape[0], 2 * shape[1], dtype=dtype, seed=4) * 3
    gate, up = x.double().chunk(2, -1)
    out = run_poisoned(lambda: ops.silu_and_mul(x), shape, dtype)
    assert_close(out, gate * torch.sigmoid(gate) * up, LIMIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_linear(tokens: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 96, dtype=dtype, seed=5), random(40, 96, dtype=dtype, seed=6)
    added = random(40, dtype=dtype, seed=7) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    assert_close(ops.linear(x, weight, added), expected, LIMIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_rotating_and_writing(tokens: int, head_dim: int, packed: bool, dtype: torch.dtype) -> None:
    """One pass, two, and q and k alone agree, in one packed projection and in tensors apart (as after a norm)."""
    shape = Shape("apart", 8, kv_heads=2, group=3, head_dim=head_dim, dtype=dtype)
    qkv = random(tokens, 10, head_dim, dtype=dtype, seed=8)
    q, k, v = qkv.split([6, 2, 2], 1)
    if not packed:
        q, k = q.contiguous(), k.contiguous()
    cos, sin = tables(tokens, head_dim // 2)
    slots = random_slots(tokens, 88, 9, skipped=False)
    expected_q, expected_k, expected_v = rotate64(q, cos, sin), rotate64(k, cos, sin), v.clone()
    assert_close(ops.rotary_embedding(q, cos, sin), expected_q, LIMIT[dtype])
    rotated_q, rotated_k = ops.rotary_qk(q, k, cos, sin)
    assert_close(rotated_q, expected_q, LIMIT[dtype])
    assert_close(rotated_k, expected_k, LIMIT[dtype])
    apart, joint = make_cache(shape, 11), make_cache(shape, 11)
    ops.reshape_and_cache(rotated_k, v, PagedKV(*apart), slots)
    assert_close(ops.rotary_and_cache(q, k, v, cos, sin, PagedKV(*joint), slots), expected_q, LIMIT[dtype])
    for key, value in (apart, joint):
        assert_close(at(key, slots), expected_k, LIMIT[dtype])
        assert torch.equal(at(value, slots), expected_v)
        assert_only_these_written(key, slots)
        assert_only_these_written(value, slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_placing_chunks(tokens: int, head_dim: int, stored_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Into the layers of one cache; the stored KV may have another dtype than the cache."""
    stored = random(2, 3, tokens + 4, 2, head_dim, dtype=stored_dtype, seed=10)
    k, v = stored[:, :, 2 : tokens + 2]
    cos, sin = tables(tokens, head_dim // 2)
    slots = random_slots(tokens, 88, 11, skipped=False)
    caches = [torch.full((3, 11, 8, 2, head_dim), torch.nan, dtype=dtype, device=DEVICE) for _ in "kv"]
    ops.place_chunks([(k, v)], cos, sin, caches[0], caches[1], slots)
    for layer in range(3):
        assert_close(at(caches[0][layer], slots), rotate64(k[layer], cos, sin), LIMIT[dtype])
        assert torch.equal(at(caches[1][layer], slots), v[layer].to(dtype))
        for cache in caches:
            assert_only_these_written(cache[layer], slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_deviation(tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every token has one, and so have some of them in any order."""
    cached = random(11, 8, 2, head_dim, dtype=dtype, seed=13)
    fresh, slots = random(tokens, 2, head_dim, dtype=dtype, seed=14), random_slots(tokens, 88, 15, skipped=False)
    expected = (fresh.double() - at(cached, slots).double()).square().sum((1, 2))
    assert_close(ops.kv_deviation(fresh, cached, slots), expected, 1e-5)
    rows = torch.arange(tokens, device=DEVICE).flip(0)[::2]
    assert_close(ops.kv_deviation(fresh, cached, slots, rows), expected[rows], 1e-5)


def test_sizes_that_the_kernels_do_not_take_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    x = random(3, 24, dtype=torch.bfloat16, seed=12)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ops.silu_and_mul(x)
    [line] = [record.getMessage() for record in caplog.records]
    assert "12 channels" in line and "multiples of 8" in line
