"""Tables of blocks grow all or nothing, and return what they hold; a request keeps features' states apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.pages import MISSING, BlockTable
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request, StateKey

SIZE = 4


@given(st.lists(st.integers(0, 60), max_size=8))
def test_a_table_grows_to_its_limit_or_not_at_all(lengths: list[int]) -> None:
    manager = BlockManager(10, SIZE)
    manager.allocate(2)
    table = BlockTable(manager, manager.allocate(1))
    assert table.max_tokens == 7 * SIZE
    for length in lengths:
        before = list(table.blocks)
        assert table.grow(length) == (length <= table.max_tokens)
        assert table.blocks[: len(before)] == before
        assert len(table.blocks) == (max(len(before), -(-length // SIZE)) if length <= 7 * SIZE else len(before))
        assert table.max_tokens == 7 * SIZE
    table.release()
    assert manager.num_free_blocks == 7


def test_a_missing_block_is_not_released() -> None:
    manager = BlockManager(6, SIZE)
    request = Request("r", [0] * 10, None, RequestMetrics(0.0))
    table = BlockTable(manager)
    assert table.grow(10) and request.num_missing_blocks == 0
    request.hold(table)
    gone = table.blocks[1]
    table.blocks[1], table.num_missing = MISSING, 1  # as when it has moved to the host
    manager.release([gone])
    assert request.block_table == [table.blocks[0], MISSING, table.blocks[2]] and request.num_missing_blocks == 1
    assert request.present_blocks() == [table.blocks[0], table.blocks[2]]
    request.release_pages()
    assert manager.num_free_blocks == 5 and request.pages is None and request.present_blocks() == []


def test_a_missing_block_that_is_not_counted_yet_is_not_released_either() -> None:
    manager = BlockManager(6, SIZE)
    table = BlockTable(manager)
    assert table.grow(10)
    manager.release([table.blocks[1]])
    table.blocks[1] = MISSING  # as when the moves of a step are interrupted
    table.release()
    assert sorted(manager.allocate(5)) == [1, 2, 3, 4, 5]


def test_states_of_features_do_not_mix() -> None:
    numbers: StateKey[int] = StateKey("numbers")
    words: StateKey[str] = StateKey("words")
    request, other = (Request(name, [0], None, RequestMetrics(0.0)) for name in "ab")
    numbers.set(request, 1)
    words.set(request, "one")
    assert numbers.get(request) == 1 and words.require(request) == "one"
    assert numbers.get(other) is None
    with pytest.raises(KeyError):
        words.require(other)
