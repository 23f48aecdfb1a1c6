from __future__ import annotations

import random

import pytest
import torch

from tests.ops_gpu.reference import TOLERANCE, Problem, assert_close, attention, make_problem
from vllm_blend.ops import cuda_attention

pytestmark = pytest.mark.gpu


def check(p: Problem, window: int | None = None, max_queries: int = 1) -> None:
    starts = p.query_start_loc if max_queries > 1 else None
    plan = cuda_attention.plan_decode(p.positions, p.block_tables, p.kv, p.q.shape[1], window, starts, max_queries)
    expected, expected_lse = attention(p, window)
    for _ in range(2):  # the second run finds what the first left in the workspace
        out = torch.full_like(p.q, float("nan"))
        lse = torch.full(p.q.shape[:2], float("nan"), device=p.q.device)
        cuda_attention.attention(p.q, p.kv, plan, p.scale, out, lse)
        assert_close(out, expected, TOLERANCE[p.q.dtype])
        assert_close(lse, expected_lse, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    check(make_problem([1, 15, 16, 17, 333, 1000], [1] * 6, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 40])
def test_groups(group: int) -> None:
    check(make_problem([400, 90], [1, 1], q_heads=2 * group, seed=group))


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 200])
def test_cut_requests(kv_heads: int, block_size: int) -> None:
    """Few KV heads leave many blocks to a request, 200 heads less than one to each."""
    head_dim = 64 if kv_heads == 200 else 128
    lengths = [3000, 64, 65, 1, 511]
    check(make_problem(lengths, [1] * 5, 2 * kv_heads, kv_heads, head_dim, block_size, seed=kv_heads))


@pytest.mark.parametrize("window", [1, 16, 100, 5000])
def test_sliding_window(window: int) -> None:
    check(make_problem([3000, 64, 1], [1] * 3, seed=window), window)


@pytest.mark.parametrize("seed", range(30))
def test_random_batches(seed: int) -> None:
    """Any mixture of lengths is cut somewhere: at edges of tiles, of requests, near them, in short and long ones."""
    draw = random.Random(seed)
    kv_heads, head_dim = draw.choice([1, 2, 4, 8]), draw.choice([64, 128])
    longest = draw.choice([20, 300, 3000])
    lengths = [draw.randint(1, longest) for _ in range(draw.choice([1, 2, 5, 17, 150]))]
    window = draw.choice([None, None, draw.randint(1, longest)])
    group = draw.randint(1, 8)
    check(make_problem(lengths, [1] * len(lengths), group * kv_heads, kv_heads, head_dim, seed=seed), window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 70])
def test_few_queries(window: int | None, head_dim: int, dtype: torch.dtype) -> None:
    """Scattered queries as well as a request's last ones, none of a request, and more rows than a register tile."""
    p = make_problem([700, 33, 5, 2000, 64], [4, 2, 0, 1, 4], 8, 2, head_dim, dtype=dtype, seed=head_dim)
    check(p, window, 4)


@pytest.mark.parametrize("seed", range(20))
def test_random_few_queries(seed: int) -> None:
    draw = random.Random(seed)
    group, kv_heads = draw.choice([1, 2, 3, 4, 7, 8]), draw.choice([1, 2, 8])
    most = cuda_attention.decode_max_queries(group * kv_heads, kv_heads, 128)
    assert most == 32 // group
    lengths = [draw.randint(most, draw.choice([60, 2500])) for _ in range(draw.choice([1, 3, 40]))]
    counts = [draw.randint(0, most) for _ in lengths]
    counts[-1] = most
    check(make_problem(lengths, counts, group * kv_heads, kv_heads, seed=seed), None, most)


def test_no_requests() -> None:
    p = make_problem([5], [0])
    plan = cuda_attention.plan_decode(p.positions, p.block_tables[:0], p.kv, 8)
    assert cuda_attention.attention(p.q, p.kv, plan, p.scale).shape == (0, 8, 128)


def test_strided_rows() -> None:
    p = make_problem([700, 20, 33], [1] * 3)
    plan = cuda_attention.plan_decode(p.positions, p.block_tables, p.kv, 8)
    q, out = (torch.full((3, 20, 128), float("nan"), device="cuda", dtype=p.q.dtype)[:, 4:12] for _ in range(2))
    q.copy_(p.q)
    cuda_attention.attention(q, p.kv, plan, p.scale, out)
    assert_close(out, attention(p)[0], TOLERANCE[p.q.dtype])


def test_graph_replay_follows_the_positions() -> None:
    """Captured for long contexts and replayed for short ones, and the other way round."""
    p = make_problem([2000, 1500, 3000], [1] * 3)
    positions = p.positions.clone()
    out = torch.empty_like(p.q)

    def step() -> None:
        plan = cuda_attention.plan_decode(positions, p.block_tables, p.kv, 8)
        for _ in range(2):
            cuda_attention.attention(p.q, p.kv, plan, p.scale, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([0, 1499, 17], [1999, 0, 2999], [700, 15, 16]):
        positions.copy_(torch.tensor(now))
        out.fill_(float("nan"))
        graph.replay()
        moved = Problem(p.q, p.key, p.value, positions.clone(), p.query_start_loc, p.block_tables, p.scale)
        assert_close(out, attention(moved)[0], TOLERANCE[p.q.dtype])


def test_bad_input_names_the_fault() -> None:
    p = make_problem([40, 30], [1, 1])
    plan = cuda_attention.plan_decode(p.positions, p.block_tables, p.kv, 8)
    with pytest.raises(TypeError, match="positions"):
        cuda_attention.plan_decode(p.positions.int(), p.block_tables, p.kv, 8)
    with pytest.raises(ValueError, match="block tables"):
        cuda_attention.plan_decode(p.positions, p.block_tables[:1], p.kv, 8)
    with pytest.raises(RuntimeError, match="query heads"):
        cuda_attention.plan_decode(p.positions, p.block_tables, p.kv, 7)
    with pytest.raises(RuntimeError, match="size is out of range"):
        cuda_attention.plan_decode(p.positions, p.block_tables, p.kv, 8, None, p.query_start_loc, 9)
    with pytest.raises(ValueError, match="the plan is for"):
        cuda_attention.attention(p.q[:1], p.kv, plan, p.scale)
    with pytest.raises(TypeError, match="q is"):
        cuda_attention.attention(p.q.float(), p.kv, plan, p.scale)
    with pytest.raises(ValueError, match="contiguous"):
        cuda_attention.attention(p.q.transpose(0, 1).contiguous().transpose(0, 1), p.kv, plan, p.scale)
