"""Head pages: each given out once, blocks go back whole, and what owners release makes whole blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks
from vllm_blend.features.kv_compress.pages import HeadPagePool

OWNERS = st.integers(0, 3)


def block_of(page: int, num_blocks: int, kv_heads: int) -> int:
    return page // kv_heads % num_blocks


class Paging(RuleBasedStateMachine):
    """Owners that take and release pages, beside others who take and release ordinary blocks."""

    @initialize(num_blocks=st.integers(2, 7), layers=st.integers(1, 3), heads=st.integers(1, 3))
    def start(self, num_blocks: int, layers: int, heads: int) -> None:
        self.blocks = BlockManager(num_blocks, 4)
        self.pool = HeadPagePool(self.blocks, layers, heads)
        self.heads, self.each = heads, layers * heads
        self.taken: set[int] = set()
        self.ordinary: list[int] = []

    @rule(wanted=st.dictionaries(OWNERS, st.integers(0, 12), min_size=1))
    def allocate(self, wanted: dict[int, int]) -> None:
        counts, owners = np.array([*wanted.values()]), np.array([*wanted])
        before = self.pool.num_free_pages, self.pool.num_used_pages, self.blocks.num_free_blocks
        if counts.sum() > self.pool.num_free_pages:
            with pytest.raises(OutOfBlocks, match=f"{counts.sum()} head pages were asked for, {before[0]} of"):
                self.pool.allocate_each(counts, owners)
            assert (self.pool.num_free_pages, self.pool.num_used_pages, self.blocks.num_free_blocks) == before
            return
        pages = self.pool.allocate_each(counts, owners)
        assert pages.dtype == np.int32 and len(pages) == counts.sum()
        assert self.pool.num_free_pages == before[0] - len(pages)
        new = set(pages.tolist())
        assert len(new) == len(pages) and not new & self.taken
        self.taken |= new

    @rule(count=st.integers(1, 3))
    def take_blocks(self, count: int) -> None:
        if count <= self.blocks.num_free_blocks:
            self.ordinary += self.blocks.allocate(count)

    @rule()
    def release_blocks(self) -> None:
        self.blocks.release(self.ordinary)
        self.ordinary = []

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        before = self.pool.num_free_pages
        self.pool.release(np.array(pages, np.int32))
        self.taken -= set(pages)
        assert self.pool.num_free_pages == before + len(pages)

    @rule(data=st.data())
    def release_wrongly(self, data: st.DataObject) -> None:
        """Release a page of another owner, one that does not exist, or one twice, among others that are right."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True)) if self.taken else []
        total = self.blocks.num_blocks * self.each
        wrong = [page for page in range(-2, total + 2) if page not in self.taken] + pages
        pages.insert(data.draw(st.integers(0, len(pages))), data.draw(st.sampled_from(wrong)))
        with pytest.raises(RuntimeError, match="head page"):
            self.pool.release(np.array(pages))

    @invariant()
    def counted(self) -> None:
        cut = {block_of(page, self.blocks.num_blocks, self.heads) for page in self.taken}
        assert not cut & {0, *self.ordinary}
        assert self.pool.num_used_pages == len(self.taken) and self.pool.num_cut_blocks == len(cut)
        free_blocks = self.blocks.num_usable_blocks - len(cut) - len(self.ordinary)
        assert self.blocks.num_free_blocks == free_blocks
        assert self.pool.num_free_pages == (free_blocks + len(cut)) * self.each - len(self.taken)


TestPaging = Paging.TestCase
TestPaging.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_fullest_block_is_used_first() -> None:
    pool = HeadPagePool(BlockManager(6, 4), 2, 2)
    blocks = np.sort(pool.allocate(12).reshape(3, 4))  # three blocks of four pages
    for pages, released in zip(blocks, (2, 1, 3), strict=True):
        pool.release(pages[:released])
    taken = pool.allocate(6).tolist()
    assert set(taken[:1]) == {blocks[1, 0]} and set(taken[1:3]) == set(blocks[0, :2])
    assert set(taken[3:]) == set(blocks[2, :3])
    assert pool.num_cut_blocks == 3


def test_the_fullest_block_of_every_owner_is_used_first() -> None:
    pool = HeadPagePool(BlockManager(9, 4), 2, 2)
    owners, holes = np.array([4, 1]), []
    for owner in owners:
        blocks = np.sort(pool.allocate(8, owner).reshape(2, 4))
        pool.release(np.concatenate([blocks[0, :3], blocks[1, :2]]))
        holes.append((set(blocks[0, :3]), set(blocks[1, :2])))
    pages = np.split(pool.allocate_each(np.array([3, 4]), owners), [3])
    for taken, (three, two) in zip(pages, holes, strict=True):
        assert set(taken[:2]) == two and set(taken[2:]) <= three


def test_pages_of_an_owner_go_back_as_whole_blocks() -> None:
    manager = BlockManager(9, 4)  # eight blocks of four pages
    pool = HeadPagePool(manager, 2, 2)
    owners = np.array([5, 2])
    held: dict[int, list[int]] = {owner: [] for owner in owners.tolist()}
    for _ in range(5):  # three pages of each, in turns
        pages = pool.allocate_each(np.array([1, 2]), owners)
        held[5] += pages[:1].tolist()
        held[2] += pages[1:].tolist()
    assert pool.num_cut_blocks == 2 + 3 and manager.num_free_blocks == 3
    pool.release(np.array(held[2]))
    assert pool.num_cut_blocks == 2 and manager.num_free_blocks == 6


def test_other_owners_blocks_are_used_when_no_block_is_free() -> None:
    manager = BlockManager(3, 4)
    pool = HeadPagePool(manager, 2, 2)
    first = pool.allocate(1, owner=0)
    second = pool.allocate(1, owner=1)
    assert manager.num_free_blocks == 0
    third = pool.allocate_each(np.array([4, 2]), np.array([2, 1]))
    assert pool.num_free_pages == 0
    assert block_of(third[4], 3, 2) == block_of(third[5], 3, 2) == block_of(second[0], 3, 2)  # its own come first
    pool.release(np.concatenate([first, second, third]))
    assert manager.num_free_blocks == 2


@pytest.mark.parametrize(("layers", "heads"), [(0, 1), (1, 0)])
def test_bad_shapes(layers: int, heads: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        HeadPagePool(BlockManager(3, 4), layers, heads)


def test_more_pages_than_int32_can_number() -> None:
    manager = BlockManager(3, 4)
    manager.num_blocks = 1 << 25
    with pytest.raises(ValueError, match="num_gpu_blocks_override"):
        HeadPagePool(manager, 16, 8)
