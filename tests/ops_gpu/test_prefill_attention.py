from __future__ import annotations

import pytest
import torch

from tests.ops_gpu import cases
from tests.ops_gpu.reference import TOLERANCE, VARIANTS, Problem, assert_close, attention, make_problem
from vllm_blend.ops import cuda_attention
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu


def check(p: Problem, variant: str, window: int | None = None) -> None:
    plan = cuda_attention.plan_prefill(
        p.positions, p.query_start_loc, p.block_tables, p.kv, p.q.shape[1], window, variant
    )
    expected, expected_lse = attention(p, window)
    for _ in range(2):  # the second run finds whatever the first left in the workspace
        out = torch.full_like(p.q, float("nan"))
        lse = torch.full(p.q.shape[:2], float("nan"), device=p.q.device)
        cuda_attention.attention(p.q, p.kv, plan, p.scale, out, lse)
        assert_close(out, expected, TOLERANCE[p.q.dtype])
        assert_close(lse, expected_lse, 1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim: int, dtype: torch.dtype, variant: str) -> None:
    check(make_problem([700, 333], [150, 40], head_dim=head_dim, dtype=dtype), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_groups(group: int, variant: str) -> None:
    check(make_problem([400, 90], [120, 90], q_heads=2 * group, seed=group), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes(block_size: int, variant: str) -> None:
    check(make_problem([515, 260, 17], [33, 260, 2], block_size=block_size, seed=block_size), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [1, 7, 64, 100, 128, 1000])
def test_sliding_window(window: int, variant: str) -> None:
    check(make_problem([900, 130, 64], [200, 130, 64], seed=window), variant, window)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("window", [None, 130])
def test_plenty_of_work(window: int | None, head_dim: int, variant: str) -> None:
    """Enough tiles for the longer key tiles and for several whole tiles a block."""
    check(make_problem([900] * 12, [300] * 12, 32, 4, head_dim, seed=5), variant, window)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lone_tokens_and_empty_requests(variant: str) -> None:
    check(make_problem([1, 40, 129, 300, 128], [1, 0, 1, 1, 128]), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tokens(variant: str) -> None:
    p = make_problem([5], [0])
    plan = cuda_attention.plan_prefill(p.positions, p.query_start_loc, p.block_tables, p.kv, 8, None, "mma")
    assert cuda_attention.attention(p.q, p.kv, plan, p.scale).shape == (0, 8, 128)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_split_keys(head_dim: int, variant: str) -> None:
    """Few long tiles are split over their keys, also with a window that leaves some rows of a part nothing."""
    p = make_problem([6000, 50], [20, 3], q_heads=8, kv_heads=2, head_dim=head_dim, seed=3)
    check(p, variant)
    check(p, variant, 1500)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("kv_heads", "count"), [(1, 32), (8, 32), (1, 2), (4, 70)])
def test_few_tiles_of_many_parts(kv_heads: int, count: int, head_dim: int, variant: str) -> None:
    """More parts of a tile than blocks that merge columns, as many, and fewer; two and three parts beside them."""
    p = make_problem([7000, 600], [count, 5], 4 * kv_heads, kv_heads, head_dim, seed=kv_heads)
    check(p, variant)
    check(p, variant, 3000)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_requests(variant: str) -> None:
    longest = 20 if cases.MOST else 200
    lengths = [1 + (i * 37) % longest for i in range(1500)]
    check(make_problem(lengths, [1 + n // 5 if i % 4 else 0 for i, n in enumerate(lengths)], 2, 1, 64), variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_strided_query_and_pages(variant: str) -> None:
    """q as a slice of a packed projection; key and value interleaved in one pool (a page stride of twice a page)."""
    p = make_problem([300, 77], [64, 77])
    packed = torch.randn(p.q.shape[0], 12, 128, device="cuda").to(p.q.dtype)
    packed[:, :8] = p.q
    pool = torch.stack([p.key, p.value], 1)
    check(
        Problem(packed[:, :8], pool[:, 0], pool[:, 1], p.positions, p.query_start_loc, p.block_tables, p.scale), variant
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_graph_replay_after_positions_change(variant: str) -> None:
    """Planning and attention captured together follow new positions: nothing of them is baked into the graph."""
    p = make_problem([500], [100], seed=1)
    positions = p.positions.clone()
    out = torch.empty_like(p.q)

    def step() -> None:
        plan = cuda_attention.plan_prefill(positions, p.query_start_loc, p.block_tables, p.kv, 8, None, variant)
        cuda_attention.attention(p.q, p.kv, plan, p.scale, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    other = make_problem([500], [100], seed=2).positions
    positions.copy_(other)
    graph.replay()
    moved = Problem(p.q, p.key, p.value, other, p.query_start_loc, p.block_tables, p.scale)
    assert_close(out, attention(moved)[0], TOLERANCE[p.q.dtype])


def test_bad_input_names_the_fault() -> None:
    p = make_problem([40], [8])
    with pytest.raises(TypeError, match="positions"):
        cuda_attention.plan_prefill(p.positions.int(), p.query_start_loc, p.block_tables, p.kv, 8)
    with pytest.raises(RuntimeError, match="query heads"):
        cuda_attention.plan_prefill(p.positions, p.query_start_loc, p.block_tables, p.kv, 7)
    with pytest.raises(RuntimeError, match="head_dim"):
        cuda_attention.plan_prefill(
            p.positions, p.query_start_loc, p.block_tables, PagedKV(p.key[..., :72], p.value[..., :72]), 8
        )
    plan = cuda_attention.plan_prefill(p.positions, p.query_start_loc, p.block_tables, p.kv, 8)
    with pytest.raises(ValueError, match="the plan is for"):
        cuda_attention.attention(p.q[:4], p.kv, plan, p.scale)
