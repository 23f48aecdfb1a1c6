from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops_gpu.reference import DEVICE, TOLERANCE, VARIANTS, assert_close, attention, make_problem, probabilities
from vllm_blend import ops
from vllm_blend.ops import cuda_attention
from vllm_blend.ops.deviation import kv_deviation_reference
from vllm_blend.ops.e4m3 import E4M3
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (2, 256)])
@pytest.mark.parametrize("tokens", [0, 1, 77])
def test_kv_deviation(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    cache = torch.randn(6, 16, kv_heads, head_dim, device=DEVICE).to(dtype)
    fresh = torch.randn(tokens, kv_heads + 1, head_dim, device=DEVICE).to(dtype)[:, 1:]
    slots = torch.randperm(96, device=DEVICE)[:tokens]
    expected = kv_deviation_reference(fresh.double(), cache.double(), slots)
    assert_close(ops.kv_deviation(fresh, cache, slots), expected, 1e-5)
    rows = torch.randperm(tokens, device=DEVICE)[: tokens // 2]
    assert_close(ops.kv_deviation(fresh, cache, slots, rows), expected[rows], 1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("head_dim", "q_heads", "kv_heads", "rows", "window"),
    [
        (128, 32, 8, 20, None),
        (64, 14, 2, 1, None),
        (80, 9, 9, 17, 100),
        (96, 5, 1, 33, None),
        (256, 8, 2, 7, 64),
        (128, 32, 8, 100, None),
        (128, 4, 1, 70, 130),
        (256, 16, 2, 50, None),
    ],
)
def test_attention_mass(
    head_dim: int, q_heads: int, kv_heads: int, rows: int, window: int | None, dtype: torch.dtype, variant: str
) -> None:
    """The mass of a request's queries, from the LSE that attention returns for them; the same bits every time."""
    n = 1030
    p = make_problem([n], [rows], q_heads, kv_heads, head_dim, dtype=dtype)
    plan = cuda_attention.plan_prefill(p.positions, p.query_start_loc, p.block_tables, p.kv, q_heads, window)
    lse = torch.full(p.q.shape[:2], float("nan"), device=DEVICE)
    cuda_attention.attention(p.q, p.kv, plan, p.scale, lse=lse)

    def measure() -> torch.Tensor:
        mass = torch.zeros(kv_heads, n, device=DEVICE)
        for _ in range(2):  # two layers
            cuda_attention.attention_mass(
                p.q, lse, p.positions, p.kv, p.block_tables[0], mass, p.scale, window, variant
            )
        return mass

    mass = measure()
    expected = 2 * probabilities(p, 0, window)[0].sum(1).mean(0)
    assert_close(mass.sum(0), expected, 2e-3)
    assert abs(mass.sum().item() - 2 * rows) < 2e-3 * rows
    assert torch.equal(mass, measure())


@pytest.mark.parametrize("variant", ["mma", "auto"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("window", [None, 64])
def test_masses_of_several_requests_are_those_of_each(
    window: int | None, cache_dtype: torch.dtype, variant: str
) -> None:
    """To the bit, also where some have no rows, and where their masses lie anywhere."""
    lengths, counts = [1030, 40, 700, 129, 2000], [20, 3, 0, 129, 100]
    p = make_problem(lengths, counts, 32, 8, 128, cache_dtype=cache_dtype)
    plan = cuda_attention.plan_prefill(p.positions, p.query_start_loc, p.block_tables, p.kv, 32, window)
    lse = torch.empty(p.q.shape[:2], device=DEVICE)
    cuda_attention.attention(p.q, p.kv, plan, p.scale, lse=lse)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    rows = [slice(start + count // 2, start + count) for start, count in zip(starts, counts, strict=True)]
    several, each = ([torch.full((8, n), 0.5, device=DEVICE) for n in reversed(lengths)][::-1] for _ in range(2))
    masses = cuda_attention.MassPlan(rows, several)
    for _ in range(2):  # two layers
        cuda_attention.attention_masses(p.q, lse, p.positions, p.kv, p.block_tables, masses, p.scale, window, variant)
        for index, own in enumerate(rows):
            given = (p.q[own], lse[own], p.positions[own], p.kv, p.block_tables[index], each[index], p.scale, window)
            cuda_attention.attention_mass(*given, variant)
    assert all(map(torch.equal, several, each))
    assert each[0].sum() > 0.5 * each[0].numel() + 9 and torch.equal(each[2], torch.full_like(each[2], 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_merge_states(head_dim: int, dtype: torch.dtype) -> None:
    """Two halves of the keys merge to the whole; a state that saw nothing changes nothing, whatever it holds."""
    whole = make_problem([512], [1], 8, 2, head_dim, dtype=dtype)
    states = []
    for first, count in ((0, 200), (200, 312)):
        rows = [c[whole.block_tables[0].long()].flatten(0, 1)[first : first + count] for c in (whole.key, whole.value)]
        kv = PagedKV(*(F.pad(r, (0, 0, 0, 0, 0, -count % 16)).unflatten(0, (-1, 16)) for r in rows))
        table = torch.arange(kv.key.shape[0], dtype=torch.int32, device=DEVICE)[None]
        lse = torch.empty(1, 8, device=DEVICE)
        position = torch.tensor([count - 1], device=DEVICE)
        plan = cuda_attention.plan_decode(position, table, kv, 8)
        out = cuda_attention.attention(whole.q, kv, plan, whole.scale, lse=lse)
        states.append((out, lse))
    out, lse = ops.merge_states(*states[0], *states[1])
    expected, expected_lse = attention(whole)
    assert_close(out, expected, TOLERANCE[dtype])
    assert_close(lse, expected_lse, 1e-3)
    nothing = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for merged in (ops.merge_states(out, lse, *nothing), ops.merge_states(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert_close(merged[1], lse, 1e-6)
