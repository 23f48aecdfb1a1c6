from __future__ import annotations

import pytest
import torch

from tests.ops_gpu.reference import DEVICE, TOLERANCE, assert_close, attention, make_problem, probabilities
from vllm_blend.ops import cuda

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (2, 256)])
@pytest.mark.parametrize("tokens", [0, 1, 77])
def test_kv_deviation(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    cache = torch.randn(6, 16, kv_heads, head_dim, device=DEVICE).to(dtype)
    fresh = torch.randn(tokens, kv_heads + 1, head_dim, device=DEVICE).to(dtype)[:, 1:]
    slots = torch.randperm(96, device=DEVICE)[:tokens]
    expected = (fresh.double() - cache.view(-1, kv_heads, head_dim)[slots].double()).pow(2).sum((1, 2))
    deviation = torch.full((tokens,), float("nan"), device=DEVICE)
    cuda.kv_deviation(fresh, cache, slots, deviation)
    assert_close(deviation, expected, 1e-5)
    cuda.kv_deviation(fresh, cache, slots, deviation, accumulate=True)
    assert_close(deviation, 2 * expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "q_heads", "kv_heads", "rows", "window"),
    [(128, 32, 8, 20, None), (64, 14, 2, 1, None), (80, 9, 9, 17, 100), (96, 5, 1, 33, None), (256, 8, 2, 7, 64)],
)
def test_attention_mass(
    head_dim: int, q_heads: int, kv_heads: int, rows: int, window: int | None, dtype: torch.dtype
) -> None:
    """The mass of a request's queries, from the LSE that prefill attention returns for them."""
    p = make_problem([430], [rows], q_heads, kv_heads, head_dim, dtype=dtype)
    plan = cuda.plan_prefill(p.positions, p.query_start_loc, p.block_tables, p.key, p.value, q_heads, window)
    lse = torch.full(p.q.shape[:2], float("nan"), device=DEVICE)
    cuda.prefill_attention(p.q, p.key, p.value, plan, p.scale, lse=lse)
    mass = torch.zeros(kv_heads, 430, device=DEVICE)
    for _ in range(2):  # two layers
        cuda.attention_mass(p.q, lse, p.positions, p.key, p.value, p.block_tables[0], mass, p.scale, window)
    expected = 2 * probabilities(p, 0, window)[0].sum(1).mean(0)
    assert_close(mass.sum(0), expected, 2e-3)
    assert abs(mass.sum().item() - 2 * rows) < 2e-3 * rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_merge_states(head_dim: int, dtype: torch.dtype) -> None:
    """Two halves of the keys merge to the whole; a state that saw nothing changes nothing, whatever it holds."""
    whole = make_problem([512], [1], 8, 2, head_dim, dtype=dtype)
    workspace = cuda.decode_workspace(1, 8, 2, head_dim, whole.q.device)
    states = []
    for first, count in ((0, 200), (200, 312)):
        rows = [c[whole.block_tables[0].long()].flatten(0, 1)[first : first + count] for c in (whole.key, whole.value)]
        key, value = (torch.nn.functional.pad(r, (0, 0, 0, 0, 0, -count % 16)).unflatten(0, (-1, 16)) for r in rows)
        table = torch.arange(key.shape[0], dtype=torch.int32, device=DEVICE)[None]
        lse = torch.empty(1, 8, device=DEVICE)
        position = torch.tensor([count - 1], device=DEVICE)
        out = cuda.decode_attention(whole.q, key, value, position, table, whole.scale, workspace, 512, lse=lse)
        states.append((out, lse))
    out, lse = cuda.merge_states(*states[0], *states[1])
    expected, expected_lse = attention(whole)
    assert_close(out, expected, TOLERANCE[dtype])
    assert_close(lse, expected_lse, 1e-3)
    nothing = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for merged in (cuda.merge_states(out, lse, *nothing), cuda.merge_states(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert_close(merged[1], lse, 1e-6)
