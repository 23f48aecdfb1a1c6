"""The norm over heads, rotation and cache write in one kernel: what the three make one after another."""

from __future__ import annotations

import pytest
import torch

from vllm_blend import ops
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

EPS = 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (8, 8), (16, 8), (40, 5)])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (128, 64), (256, 128), (96, 48), (80, 16)])  # 96, 80: apart
@pytest.mark.parametrize("tokens", [0, 1, 3, 53])
def test_norm_rotary_and_cache(
    tokens: int, head_dim: int, half: int, q_heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    sizes = [q_heads, kv_heads, kv_heads]
    packed = (torch.randn(tokens, sum(sizes), head_dim, device="cuda") * 3).to(dtype)
    q, k, v = packed.split(sizes, 1)
    weights = [(1 + torch.randn(head_dim, device="cuda") / 4).to(dtype) for _ in "qk"]
    angles = torch.rand(tokens, half, device="cuda") * 100
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(128, device="cuda")[:tokens]
    slots[1:2] = -1  # a row that is not to be stored
    caches = [torch.full((8, 16, kv_heads, head_dim), torch.nan, device="cuda", dtype=dtype) for _ in "kv"]
    expected_caches = [cache.clone() for cache in caches]

    normed = [ops.rms_norm(x.contiguous(), w, EPS) for x, w in zip((q, k), weights, strict=True)]
    expected = ops.rotary_and_cache(normed[0], normed[1], v.clone(), cos, sin, PagedKV(*expected_caches), slots)
    out = ops.rotary_and_cache(q, k, v, cos, sin, PagedKV(*caches), slots, ops.HeadNorms(weights[0], weights[1], EPS))

    # A head's mean square is added up in another order, which may move a value to the neighbouring one.
    spacing = 2.0 ** (-10 if dtype == torch.float16 else -7)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2 * spacing, atol=4 * spacing)
    for cache, other in zip(caches, expected_caches, strict=True):
        assert torch.equal(cache.isnan(), other.isnan())
        torch.testing.assert_close(
            cache.float().nan_to_num(), other.float().nan_to_num(), rtol=2 * spacing, atol=4 * spacing
        )
