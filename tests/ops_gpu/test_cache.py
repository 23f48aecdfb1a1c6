from __future__ import annotations

import pytest
import torch

from tests.ops_gpu.pages import addresses
from tests.ops_gpu.reference import TOLERANCE, assert_close
from vllm_blend import ops
from vllm_blend.ops import cuda
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]


def rotate64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation in float64 of x [..., tokens, heads, head_dim]."""
    half = cos.shape[-1]
    x, c, s = x.double(), cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * c - b * s, b * c + a * s, x[..., 2 * half :]], -1)


def tables(n: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(n, device="cuda")[:, None] * 10000 ** (-torch.arange(half, device="cuda") / max(half, 1))
    return angles.cos().float(), angles.sin().float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "half"), [(64, 32), (80, 40), (96, 48), (128, 64), (256, 128), (128, 32), (80, 16)]
)
def test_place_chunk(head_dim: int, half: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    layers, tokens, kv_heads, blocks, block_size = 3, 37, 2, 9, 16
    k, v = (torch.randn(layers, tokens, kv_heads, head_dim, device="cuda").to(dtype) for _ in range(2))
    keys = [torch.full((blocks, block_size, kv_heads, head_dim), float("nan"), device="cuda", dtype=dtype) for _ in k]
    values = [torch.full_like(c, float("nan")) for c in keys]
    slots = torch.randperm(blocks * block_size, device="cuda")[:tokens]
    slots[5] = -1
    cos, sin = (t[torch.randint(0, 1000, (tokens,))] for t in tables(1000, half))
    cuda.place_chunks([(k, v)], cos, sin, addresses(keys), addresses(values), keys[0], slots)
    kept = slots >= 0
    for layer in range(layers):
        placed, placed_v = (c[layer].view(-1, kv_heads, head_dim) for c in (keys, values))
        assert_close(placed[slots[kept]], rotate64(k[layer], cos, sin)[kept], TOLERANCE[dtype])
        # Cast once, from float32: but for rare ties this is the exact value, rounded.
        assert_close(placed[slots[kept]], rotate64(k[layer], cos, sin).to(dtype)[kept], TOLERANCE[dtype] / 20)
        assert torch.equal(placed_v[slots[kept]], v[layer][kept])
        for cache in (placed, placed_v):
            assert int(torch.isnan(cache).any(-1).any(-1).sum()) == blocks * block_size - int(kept.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 100])
def test_reshape_and_cache(tokens: int, dtype: torch.dtype) -> None:
    packed = torch.randn(tokens, 6, 96, device="cuda").to(dtype)
    k, v = packed[:, 2:4], packed[:, 4:6]
    key = torch.full((11, 16, 2, 96), float("nan"), device="cuda", dtype=dtype)
    value = torch.full_like(key, float("nan"))
    slots = torch.randperm(176, device="cuda")[:tokens]
    ops.reshape_and_cache(k, v, PagedKV(key, value), slots)
    for cache, rows in ((key, k), (value, v)):
        flat = cache.view(-1, 2, 96)
        assert torch.equal(flat[slots], rows)
        assert int(torch.isnan(flat).any(-1).any(-1).sum()) == 176 - tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (128, 64), (80, 16), (256, 128)])
@pytest.mark.parametrize("tokens", [0, 1, 53])
def test_rope_and_cache(tokens: int, head_dim: int, half: int, dtype: torch.dtype) -> None:
    q_heads, kv_heads = 6, 2
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    before = qkv.clone().view(tokens, q_heads + 2 * kv_heads, head_dim)
    cos, sin = tables(500, half)
    positions = torch.randperm(500, device="cuda")[:tokens].sort().values
    slots = torch.randperm(128, device="cuda")[:tokens]
    key = torch.full((8, 16, kv_heads, head_dim), float("nan"), device="cuda", dtype=dtype)
    value = torch.full_like(key, float("nan"))
    q, k, v = qkv.view(tokens, q_heads + 2 * kv_heads, head_dim).split([q_heads, kv_heads, kv_heads], 1)
    ops.rotary_and_cache(q, k, v, cos[positions], sin[positions], PagedKV(key, value), slots)
    after = qkv.view(tokens, q_heads + 2 * kv_heads, head_dim)
    rotated = rotate64(before, cos[positions], sin[positions])
    assert_close(after[:, :q_heads], rotated[:, :q_heads], TOLERANCE[dtype])
    assert torch.equal(after[:, q_heads:], before[:, q_heads:])
    flat_k, flat_v = (c.view(-1, kv_heads, head_dim) for c in (key, value))
    assert_close(flat_k[slots], rotated[:, q_heads : q_heads + kv_heads], TOLERANCE[dtype])
    assert torch.equal(flat_v[slots], before[:, q_heads + kv_heads :])
    assert int(torch.isnan(flat_k).any(-1).any(-1).sum()) == 128 - tokens
