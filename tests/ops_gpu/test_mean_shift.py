"""The kernels of the mean shift against plain torch and, token by token, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops import shifts
from tests.ops_gpu import cases, pages
from tests.ops_gpu.pages import HEAD_DIMS
from tests.ops_gpu.reference import DEVICE, TOLERANCE, assert_close
from vllm_blend import ops
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

LIMITS = {**TOLERANCE, torch.float32: 1e-6}  # float32 has no kernel: plain torch runs
LAYOUTS = st.sampled_from(["apart", "one pool", "heads outside", "layers"])
# A prompt of 8 passages, two beside it, one long passage: several waves of blocks, and many rows in a segment.
LARGE = [
    shifts.Shape(((512,) * 8,), gap=1, share=0.15, kv_heads=8, head_dim=128, half=64, seed=1),
    shifts.Shape(((300, 512), (77,) * 9), gap=0, share=0.08, kv_heads=8, head_dim=128, half=64, seed=2),
    shifts.Shape(((6000, 40),), gap=3, share=0.5, kv_heads=2, head_dim=64, half=32, seed=3),
]


def problem_and_caches(
    shape: shifts.Shape, block_size: int, dtype: torch.dtype, layout: str, stored_on: str = DEVICE
) -> tuple[shifts.Problem, tuple[torch.Tensor, torch.Tensor]]:
    problem = shifts.make_problem(shape, block_size, dtype, DEVICE, stored_on)
    layout_of = pages.Shape(layout, block_size, shape.kv_heads, 1, shape.head_dim, dtype)
    return problem, pages.make_cache(layout_of, problem.num_blocks)


def check(problem: shifts.Problem, caches: tuple[torch.Tensor, torch.Tensor], compiled: bool) -> None:
    """The caches are NaN: every token that is not to move stays so."""
    dtype, size = caches[0].dtype, caches[0].shape[1]
    before = caches[0].clone(), caches[1].clone()
    twin = PagedKV(caches[0].clone(), caches[1].clone())
    plan, plain = problem.run(PagedKV(*caches)), problem.run_reference(twin)
    assert (plan.table is not None) == compiled
    assert torch.equal(plan.rows, plain.rows) and torch.equal(plan.slots, plain.slots)
    shifts.assert_shifted(problem, caches, before, LIMITS[dtype])
    moved = plan.slots[plan.slots >= 0]
    for cache, expected in zip(caches, (twin.key, twin.value), strict=True):
        own = cache[moved // size, moved % size]
        assert_close(own, expected[moved // size, moved % size], LIMITS[dtype])


@settings(
    max_examples=cases.examples(80), deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    shape=shifts.shapes([*HEAD_DIMS, 16]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    block_size=st.sampled_from([16, 32, 128]),
    layout=LAYOUTS,
    stored_on=st.sampled_from([DEVICE, "cpu"]),
)
def test_random_shapes(shape: shifts.Shape, dtype: torch.dtype, block_size: int, layout: str, stored_on: str) -> None:
    problem, caches = problem_and_caches(shape, block_size, dtype, layout, stored_on)
    check(problem, caches, compiled=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", LARGE, ids=["prompt", "two prompts", "long"])
def test_large_steps(shape: shifts.Shape, dtype: torch.dtype) -> None:
    check(*problem_and_caches(shape, 16, dtype, "apart"), compiled=True)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("head_dim", [24, 64])  # half of 24 is rotated: 12 channels, no multiple of 8
def test_what_the_kernels_do_not_take(head_dim: int, dtype: torch.dtype) -> None:
    half = head_dim // 2
    shape = shifts.Shape(((40, 7, 3), (17, 1)), 2, 0.4, 3, head_dim, half, seed=5)
    check(*problem_and_caches(shape, 16, dtype, "apart"), compiled=dtype != torch.float32)


def test_stored_kv_that_the_kernel_cannot_read_is_copied() -> None:
    """K and V with other strides than each other's, and a first token that is on no boundary of 16 bytes."""
    shape = shifts.Shape(((40, 33), (17,)), 2, 0.4, 3, 64, 32, seed=6)
    problem, caches = problem_and_caches(shape, 16, torch.bfloat16, "apart")
    first, second = problem.segments[0], problem.segments[1]
    wide = torch.cat([first.v, first.v], 1)[:, : first.num_tokens]
    problem.segments[0] = ops.ShiftedSegment(first.request, first.start, first.k, wide, first.strength)
    odd = torch.empty(second.k.numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(second.k.shape)
    odd.copy_(second.k)
    problem.segments[1] = ops.ShiftedSegment(second.request, second.start, odd, second.v.contiguous(), second.strength)
    check(problem, caches, compiled=True)


def test_the_same_bits_every_time_also_in_a_graph() -> None:
    """Layers that follow each other at once share the buffer of the shifts: the second waits for the first."""
    problem, caches = problem_and_caches(LARGE[0], 16, torch.bfloat16, "apart")
    problem.run(PagedKV(*caches))
    others = [tuple(torch.full_like(cache, torch.nan) for cache in caches) for _ in range(8)]
    kvs = [PagedKV(*other) for other in others]
    sources = ops.ShiftSources(problem.segments, kvs[0])
    plan = ops.plan_mean_shift(sources, problem.positions, problem.query_start_loc, problem.block_tables, kvs[0])

    def layers() -> None:
        for i, kv in enumerate(kvs):
            swapped = (problem.v, problem.k) if i % 2 else (problem.k, problem.v)
            ops.mean_shift(plan, shifts.LAYER - i % 2, *swapped, problem.cos, problem.sin, kv)

    layers()
    first = [tuple(cache.clone() for cache in other) for other in others]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for other in others:
        for cache in other:
            cache.fill_(torch.nan)
    graph.replay()
    for i, (once, again) in enumerate(zip(first, others, strict=True)):
        for which in (0, 1):
            expected = caches[which] if i % 2 == 0 else first[1][which]
            assert torch.equal(again[which].view(torch.int16), once[which].view(torch.int16))
            assert torch.equal(again[which].view(torch.int16), expected.view(torch.int16))
