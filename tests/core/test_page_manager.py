"""Retained contexts, and the pages of chunks."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks, Retained
from vllm_blend.core.page_manager import PageManager
from vllm_blend.inputs import StoredPiece
from vllm_blend.kv_store.keys import ChunkId

SIZE = 4


class Retaining(RuleBasedStateMachine):
    """Requests that retain their contexts, take what they find, write to what they hold, and leave again."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, SIZE)
        self.content: dict[int, tuple[bytes, int]] = {}  # block -> key and index of what was written there last
        self.tables: list[list[int]] = []

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]), count=st.integers(1, 5))
    def blend(self, key: bytes, count: int) -> None:
        found = self.manager.find_retained(key)
        if found is not None:  # everything is there, as it was written
            assert [self.content[block] for block in found.blocks] == [(key, i) for i in range(len(found.blocks))]
            self.manager.take(found.blocks)
            self.tables.append(list(found.blocks))
            return
        if count > self.manager.num_free_blocks:
            with pytest.raises(OutOfBlocks):
                self.manager.allocate(count)
            return
        table = self.manager.allocate(count)
        self.content.update({block: (key, index) for index, block in enumerate(table)})
        self.manager.retain(key, Retained(tuple(table), count * SIZE))
        self.tables.append(table)

    @rule(count=st.integers(1, 4))
    def write(self, count: int) -> None:
        if count <= self.manager.num_free_blocks:
            table = self.manager.allocate(count)
            for block in table:
                self.content.pop(block, None)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.manager.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(key=st.sampled_from([b"a", b"b", b"none"]))
    def forget(self, key: bytes) -> None:
        self.manager.forget_retained(key)
        assert self.manager.find_retained(key) is None

    @invariant()
    def counted(self) -> None:
        held = {block for table in self.tables for block in table}
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks - len(held)
        owners = [block for retained in self.manager.retained.values() for block in retained.blocks]
        assert len(owners) == len(set(owners)) and set(owners) == set(self.manager._retained_by)


TestRetaining = Retaining.TestCase
TestRetaining.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_was_used_last_stays_longest() -> None:
    manager = BlockManager(7, SIZE)
    for key in (b"old", b"young"):
        table = manager.allocate(2)
        manager.retain(key, Retained(tuple(table), 2 * SIZE))
        manager.release(table)
    assert manager.find_retained(b"old") is not None  # a use
    manager.allocate(3)  # two unused blocks, and one of the other context
    assert set(manager.retained) == {b"old"}
    manager.allocate(1)  # its second block: what is left of that context is of no use
    assert set(manager.retained) == {b"old"}
    manager.allocate(1)
    assert not manager.retained


def test_forgetting_returns_how_many_blocks_become_free() -> None:
    manager = BlockManager(5, SIZE)
    table = manager.allocate(3)
    manager.retain(b"x", Retained(tuple(table), 3 * SIZE))
    manager.release(table[1:])
    assert manager.forget_retained(b"x") == 2
    assert manager.forget_retained(b"x") == 0
    manager.retain(b"y", Retained(tuple(table[:1]), SIZE))
    manager.reset_prefix_cache()
    assert not manager.retained
    manager.release(table[:1])
    assert manager.num_free_blocks == 4


def test_blocks_of_a_forgotten_context_are_reused_before_cached_content() -> None:
    manager = BlockManager(5, SIZE)
    contexts = {key: manager.allocate(2) for key in (b"kept", b"forgotten")}
    for key, table in contexts.items():
        manager.retain(key, Retained(tuple(table), 2 * SIZE))
        manager.release(table)
    manager.forget_retained(b"forgotten")
    assert sorted(manager.allocate(2)) == sorted(contexts[b"forgotten"])
    assert set(manager.retained) == {b"kept"}


def placed(chunk_id: str, start: int, stop: int) -> StoredPiece:
    return StoredPiece(start, ChunkId(chunk_id, "", tuple(range(start, stop))), ())


def test_pages_of_chunks() -> None:
    blocks = BlockManager(10, SIZE)
    pages = PageManager(blocks)
    table = pages.allocate_for_chunk("a", 2 * SIZE + 1)
    assert pages.chunk_page_tables == {"a": [tuple(table)]} and len(table) == 3
    with pytest.raises(RuntimeError, match="computed already"):
        pages.allocate_for_chunk("a", 1)
    with pytest.raises(OutOfBlocks, match=r"needs 7 pages of 4 tokens .* 6 of 9 are free"):
        pages.allocate_for_chunk("b", 7 * SIZE)
    pages.release_computed("a")
    assert not pages.chunk_page_tables and blocks.num_free_blocks == 9
    context = blocks.allocate(3)
    blocks.retain(b"k", Retained(tuple(context), 11, (placed("a", 0, 4), placed("b", 4, 6), placed("a", 6, 11))))
    one, two, three = context
    assert pages.chunk_page_tables == {"a": [(one,), (two, three)], "b": [(two,)]}
    pages.allocate_for_chunk("b", 1)
    assert pages.free_for_chunk("b") == 1  # the pages of the context are in use
    assert not blocks.retained and blocks.num_free_blocks == 6
    blocks.release(context)
    assert pages.free_for_chunk("b") == 0 and blocks.num_free_blocks == 9
