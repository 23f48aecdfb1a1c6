"""The mean shift in plain torch against float64, and what the kernels are told of it."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings

from tests.checkout import ROOT
from tests.ops import shifts
from vllm_blend import ops
from vllm_blend.ops.mean_shift import SEGMENT, TILE
from vllm_blend.ops.paged_kv import PagedKV

HEADER = (ROOT / "csrc" / "cuda" / "kernels.h").read_text()
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
SHAPE = shifts.Shape(((7, 40, 3), (16,)), gap=2, share=0.4, kv_heads=2, head_dim=16, half=8, seed=1)


def cache_of(problem: shifts.Problem, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (problem.num_blocks, block_size, *problem.k.shape[1:])
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", LIMITS)
@settings(max_examples=60, deadline=None)
@given(shape=shifts.shapes([2, 16, 24, 64]))
def test_the_plain_version_is_what_float64_gives(shape: shifts.Shape, dtype: torch.dtype) -> None:
    problem = shifts.make_problem(shape, 8, dtype, "cpu")
    caches = cache_of(problem, 8, dtype)
    before = caches[0].clone(), caches[1].clone()
    stored = [(each.k.clone(), each.v.clone()) for each in problem.segments]
    problem.run(PagedKV(*caches))
    shifts.assert_shifted(problem, caches, before, LIMITS[dtype])
    for each, (k, v) in zip(problem.segments, stored, strict=True):
        assert torch.equal(each.k, k) and torch.equal(each.v, v)


def test_a_request_is_shifted_as_it_is_alone() -> None:
    """Numbers that are not finite stay in the request that has them."""
    problem = shifts.make_problem(SHAPE, 8, torch.float32, "cpu")
    first = problem.query_start_loc[1]
    alone, together = (cache_of(problem, 8, torch.float32) for _ in range(2))
    for target, source in zip(together, alone, strict=True):
        target.copy_(source)
    problem.run(PagedKV(*alone))
    problem.k[first : problem.query_start_loc[2]] = torch.nan
    problem.run(PagedKV(*together))
    others = problem.block_tables[2].long()
    assert all(torch.equal(a[others], t[others]) for a, t in zip(alone, together, strict=True))
    assert together[0].isnan().any()


def test_what_does_not_fit_is_an_error_before_anything_is_written() -> None:
    problem = shifts.make_problem(SHAPE, 8, torch.float32, "cpu")
    caches = cache_of(problem, 8, torch.float32)
    before = caches[0].clone()
    kv = PagedKV(*caches)
    with pytest.raises(ValueError, match="segments is empty"):
        ops.ShiftSources([], kv)
    short = dataclasses.replace(problem.segments[0], k=problem.segments[0].k[:, :3])
    with pytest.raises(ValueError, match=r"segment K \[2, 3, 2, 16\] and V \[2, 7, 2, 16\] must both be \[layers, tok"):
        ops.ShiftSources([short], kv)
    with pytest.raises(ValueError, match=r"K \[2, 7, 2, 16\] .* as the cache has 1 KV heads of 16"):
        ops.ShiftSources(problem.segments, PagedKV(caches[0][:, :, :1], caches[1][:, :, :1]))
    with pytest.raises(ValueError, match=r"k \[\d+, 2, 16\] .* of layer 1 must be \[\d+, 2, 16\]"):
        dataclasses.replace(problem, k=problem.k[1:]).run(kv)
    with pytest.raises(ValueError, match=r"cos \[3, 8\] and sin \[3, 8\] must be alike, with a row for each of \d+"):
        dataclasses.replace(problem, cos=problem.cos[:3], sin=problem.sin[:3]).run(kv)
    assert torch.equal(caches[0], before)


def test_segments_are_laid_out_as_the_header_says() -> None:
    sizes = {"int64_t": 8, "int32_t": 4, "float": 4}
    [body] = re.findall(r"typedef struct \{([^}]*)\} VbShiftSegment;", re.sub(r"//[^\n]*", "", HEADER))
    fields = [line.split(maxsplit=1) for line in body.split(";") if line.strip()]
    declared = [(name.strip(), sizes[kind]) for kind, names in fields for name in names.split(",")]
    offset, expected = 0, {}
    for name, size in declared:
        expected[name] = offset, size
        offset += size
    assert {name: (field[1], field[0].itemsize) for name, field in (SEGMENT.fields or {}).items()} == expected
    assert SEGMENT.itemsize == offset == 64
    assert f"VB_SHIFT_TILE = {TILE} " in HEADER
