"""The blocks of a chunk that can move, and what is left of a block table without them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.pages import MISSING
from vllm_blend.features.offload.block_pool import HostBlockPool
from vllm_blend.features.offload.residency import Residency, movable_blocks


@given(st.integers(0, 200), st.integers(0, 100), st.sampled_from([1, 8, 16]))
def test_movable_blocks_are_those_wholly_inside(start: int, length: int, size: int) -> None:
    stop = start + length
    inside = [b for b in range(400) if b * size >= start and (b + 1) * size <= stop]
    assert list(movable_blocks(start, stop, size)) == inside


def test_tables_of_a_request_with_chunks_away() -> None:
    residency = Residency.from_bounds([11, 12, 13, 14, 15, 16], [(3, 9), (9, 20)], [1], block_size=4)
    assert [list(chunk.blocks) for chunk in residency.chunks] == [[1], [3, 4]]
    assert residency.ranks == [1, 0]
    chunk = residency.chunks[1]
    for index in chunk.blocks:
        residency.table[index] = MISSING
    chunk.resident, chunk.host = False, [7, 5]
    assert [block for block in residency.table if block != MISSING] == [11, 12, 13, 16]
    assert residency.host_table() == [7, 5]
    assert residency.num_missing_blocks == 2
    assert residency.resident_chunks == [0]


def test_a_host_block_has_one_owner() -> None:
    pool = _pool(3)
    taken = pool.allocate(2)
    assert taken is not None and len(set(taken)) == 2
    assert pool.allocate(2) is None and pool.num_free_blocks == 1
    pool.release(taken)
    with pytest.raises(RuntimeError, match="it is free"):
        pool.release(taken[:1])
    assert pool.num_free_blocks == 3


def test_a_budget_below_one_block_names_the_setting() -> None:
    with pytest.raises(ValueError, match="offload_host_gib"):
        _pool(0)


def _pool(num_blocks: int) -> HostBlockPool:
    return HostBlockPool(num_blocks * 2 * 2 * 4 * 1 * 8 * 4, 2, 4, 1, 8, torch.float32)
