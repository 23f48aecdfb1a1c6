"""Shared pages attended once give what attending each request by itself gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from vllm_blend.attention.metadata import AttentionMetadata, LayerStep
from vllm_blend.attention.torch_native import TorchNativeBackend
from vllm_blend.features.cascade.backend import CascadeBackend, CascadeData, SharedSegment, cascade_step
from vllm_blend.features.cascade.planner import build_cascade_data_for_composition
from vllm_blend.ops.paged_kv import PagedKV

SIZE, HEADS, KV_HEADS, DIM = 4, 4, 2, 16


def plan(tables: list[list[int]], shareable: list[int] | None = None, **options: Any) -> CascadeData | None:
    width = max(len(table) for table in tables)
    padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    return build_cascade_data_for_composition(
        padded, shareable or [len(table) for table in tables], **({"min_saved_blocks": 1} | options)
    )


def test_levels_of_a_tree() -> None:
    """One system prompt (1, 2), two pairs of passages after it, one request that shares nothing."""
    data = plan([[1, 2, 3, 4, 9], [7, 8], [1, 2, 5, 6], [1, 2, 3, 4], [1, 2, 5, 10], [1, 11]], [5, 2, 4, 4, 4, 2])
    assert data is not None
    assert data.levels[0] == (SharedSegment((0, 2, 3, 4, 5), 0, 1),)
    assert data.levels[1] == (SharedSegment((0, 2, 3, 4), 1, 2),)
    assert data.levels[2] == (SharedSegment((0, 3), 2, 4), SharedSegment((2, 4), 2, 3))
    assert data.own_start == (4, 0, 3, 4, 3, 1) and data.requests == [0, 2, 3, 4, 5]


def test_what_saves_too_little_is_joined_with_what_comes_after() -> None:
    data = plan([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 7], [1, 6, 8]], min_saved_blocks=3)
    assert data is not None
    assert data.levels == ((SharedSegment((0, 1, 2, 3), 0, 1),),)  # 1 block, 3 savings; what follows saves 2 and 1
    data = plan([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7]], min_saved_blocks=4)
    assert data is not None
    assert data.levels == ((SharedSegment((0, 1), 0, 4),),) and data.own_start == (4, 4, 0)
    assert plan([[1, 2], [1, 3], [4, 5]], min_saved_blocks=2) is None
    assert plan([[1, 2, 3]] * 2, [0, 3]) is None
    assert plan([[1]]) is None
    data = plan([[1, 2, 3]] * 3, [3, 2, 3], max_levels=1)
    assert data is not None and data.levels == ((SharedSegment((0, 1, 2), 0, 2),),)
    with pytest.raises(ValueError, match="min_saved_blocks=0"):
        plan([[1]], min_saved_blocks=0)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Block tables that share beginnings, computed tokens of each request, and rows of the step."""
    tables: list[list[int]] = []
    fresh = iter(range(1, 500))
    for _ in range(draw(st.integers(1, 6))):
        parent = draw(st.sampled_from([[], *tables]))
        kept = draw(st.integers(0, len(parent)))
        tables.append(parent[:kept] + [next(fresh) for _ in range(draw(st.integers(1, 4)))])
    before, rows = [], []
    for table in tables:
        rows.append(draw(st.sampled_from([1, 1, 1, 2, 5])))
        room = len(table) * SIZE - rows[-1]
        before.append(draw(st.integers(max(0, room - SIZE), max(0, room))))
        rows[-1] = min(rows[-1], len(table) * SIZE - before[-1])
    return tables, before, rows


@given(trees(), st.integers(1, 3), st.integers(1, 3))
@hypothesis_settings(max_examples=150, deadline=None)
def test_equals_attending_each_request_alone(
    tree: tuple[list[list[int]], list[int], list[int]], least: int, max_levels: int
) -> None:
    tables, before, counts = tree
    generator = torch.Generator().manual_seed(len(tables))
    shape = (max(max(table) for table in tables) + 1, SIZE, KV_HEADS, DIM)
    cache = PagedKV(*(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)))
    width = max(len(table) for table in tables)
    padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
    starts = [0, *np.cumsum(counts).tolist()]
    metadata = AttentionMetadata(
        positions=torch.cat([torch.arange(n, n + m) for n, m in zip(before, counts, strict=True)]),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        block_tables=torch.from_numpy(padded),
        query_start_loc=starts,
        seq_lens=[n + m for n, m in zip(before, counts, strict=True)],
        at_end=(True,) * len(tables),
    )
    data = build_cascade_data_for_composition(padded, [n // SIZE for n in before], least, max_levels)
    if data is None:
        return
    seen = [0] * len(tables)
    for level in data.levels:
        members = [request for segment in level for request in segment.requests]
        assert len(members) == len(set(members))
        for segment in level:
            assert (segment.stop_block - segment.first_block) * (len(segment.requests) - 1) >= least
            for request in segment.requests:
                assert segment.first_block == seen[request]
                seen[request] = segment.stop_block
    assert tuple(seen) == data.own_start
    inner = TorchNativeBackend()
    step = cascade_step(data, metadata, SIZE)
    cascade = CascadeBackend(inner, [inner] * len(step.levels), step)
    q = torch.randn(starts[-1], HEADS, DIM, generator=generator, dtype=torch.float64)
    layer = LayerStep(q, cache, metadata, 0.25)
    torch.testing.assert_close(cascade.attend(layer), inner.attend(layer), rtol=1e-9, atol=1e-9)
    windowed = layer._replace(window=3)
    torch.testing.assert_close(cascade.attend(windowed), inner.attend(windowed))
