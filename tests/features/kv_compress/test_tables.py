"""Tables and lengths on the host and on the device: always those of a plain model, and no page in two tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks
from vllm_blend.features.kv_compress.pages import HeadPagePool
from vllm_blend.features.kv_compress.tables import PADDING, HeadTables

CPU = torch.device("cpu")
MAX_LEN = 40


class Requests(RuleBasedStateMachine):
    """Requests that come with heads of any lengths, grow, shrink and leave. `lengths` is what they should have, `pages`
    how many pages each head should hold."""

    @initialize(
        num_blocks=st.integers(2, 30),
        layers=st.integers(1, 2),
        heads=st.integers(1, 3),
        block_size=st.integers(1, 4),
        num_requests=st.integers(1, 4),
    )
    def start(self, num_blocks: int, layers: int, heads: int, block_size: int, num_requests: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.pool = HeadPagePool(self.blocks, layers, heads)
        self.tables = HeadTables(self.pool, layers, heads, block_size, MAX_LEN, CPU, num_requests)
        self.shape, self.size = (layers, heads), block_size
        self.lengths: dict[int, np.ndarray] = {}
        self.pages: dict[int, np.ndarray] = {}

    def pages_for(self, lengths: np.ndarray) -> np.ndarray:
        return np.array([-(-length // self.size) for length in lengths.reshape(-1).tolist()]).reshape(lengths.shape)

    def draw_lengths(self, data: st.DataObject, most: np.ndarray) -> np.ndarray:
        return np.array([data.draw(st.integers(0, int(m))) for m in most.reshape(-1)], np.int64).reshape(most.shape)

    def draw_indices(self, data: st.DataObject, *others: int) -> list[int]:
        return data.draw(st.lists(st.sampled_from([*others, *sorted(self.lengths)]), unique=True, min_size=1))

    @rule(data=st.data(), most=st.integers(0, MAX_LEN))
    def open(self, data: st.DataObject, most: int) -> None:
        lengths = self.draw_lengths(data, np.full(self.shape, most))
        pages, free = self.pages_for(lengths), self.pool.num_free_pages
        if pages.sum() > free:
            with pytest.raises(OutOfBlocks):
                self.tables.open(lengths)
            assert self.pool.num_free_pages == free
            return
        index = self.tables.open(lengths)
        assert index not in self.lengths and index != PADDING
        self.lengths[index], self.pages[index] = lengths, pages
        assert self.pool.num_free_pages == free - pages.sum()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), each=st.booleans(), append=st.booleans())
    def grow(self, data: st.DataObject, each: bool, append: bool) -> None:
        """Append KVs, or only get the pages for them."""
        indices = self.draw_indices(data)
        counts = [data.draw(st.integers(0, 6)) for _ in indices] if each else [data.draw(st.integers(0, 6))]
        at = indices if len(indices) > 1 or data.draw(st.booleans()) else indices[0]
        n = counts if each and at is indices else counts[0]
        counts = counts if each else counts * len(indices)
        grown = {index: self.lengths[index] + n for index, n in zip(indices, counts, strict=True)}
        if append and max(int(lengths.max()) for lengths in grown.values()) > MAX_LEN:
            with pytest.raises(ValueError, match="max_len"):
                self.tables.append(at, n)
            return
        pages = {index: np.maximum(self.pages_for(grown[index]), self.pages[index]) for index in indices}
        needed, free = sum(int((pages[index] - self.pages[index]).sum()) for index in indices), self.pool.num_free_pages
        fits = needed <= free
        assert self.tables.can_append(at, n) == fits
        assert (self.tables.append if append else self.tables.reserve)(at, n) == fits
        assert self.pool.num_free_pages == free - needed * fits
        self.pages |= pages if fits else {}
        self.lengths |= grown if fits and append else {}

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def unappend(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.lengths)))
        least = int(self.lengths[index].min())
        n = data.draw(st.integers(0, least))
        with pytest.raises(ValueError, match="cannot be dropped"):
            self.tables.unappend(index, least + 1)
        before = self.tables.tables[index].copy()
        self.tables.unappend(index, n)
        self.lengths[index] = self.lengths[index] - n
        self.only_prefixes_stay(index, before)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        indices = self.draw_indices(data)
        at = indices if len(indices) > 1 else indices[0]
        lengths = np.stack([self.lengths[index] for index in indices])
        with pytest.raises(ValueError, match="must be between 0 and its lengths"):
            self.tables.shrink(at, lengths + 1)
        new_lengths, free = self.draw_lengths(data, lengths), self.pool.num_free_pages
        before = {index: self.tables.tables[index].copy() for index in indices}
        freed = self.tables.shrink(at, new_lengths if len(indices) > 1 else new_lengths[0])
        assert freed == sum(int(self.pages[index].sum()) for index in indices) - self.pages_for(new_lengths).sum()
        assert self.pool.num_free_pages == free + freed
        for index, new in zip(indices, new_lengths, strict=True):
            self.lengths[index] = new
            self.only_prefixes_stay(index, before[index])

    def only_prefixes_stay(self, index: int, before: np.ndarray) -> None:
        """Check that each table is a prefix of what it was: nothing is left of what had been reserved."""
        self.pages[index] = self.pages_for(self.lengths[index])
        kept = np.arange(before.shape[-1]) < self.pages[index][..., None]
        assert (self.tables.tables[index] == np.where(kept, before, 0)).all()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.lengths)))
        assert self.tables.close(index) == self.pages.pop(index).sum()
        del self.lengths[index]
        empty = np.zeros(self.shape, np.int64)
        for use in (
            self.tables.close,
            self.tables.append,
            self.tables.reserve,
            lambda at: self.tables.shrink(at, empty),
        ):
            with pytest.raises(RuntimeError, match=f"index {index} is not open"):
                use(index)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """Return what the device is given: one row for each head of each request, and padding."""
        indices = [*self.draw_indices(data, PADDING), *data.draw(st.lists(st.just(PADDING), max_size=2))]
        batch = self.tables.decode_batch(indices)
        lengths = np.stack([self.lengths.get(index, np.ones(self.shape, np.int64)) for index in indices], 1)
        width = max(1, -(-int(lengths.max()) // self.size))
        tables = np.stack([self.tables.tables[index] for index in indices], 1)[..., :width]
        rows = len(indices) * self.shape[1]
        assert batch.block_tables.shape == (self.shape[0], rows, width) and batch.block_tables.dtype == torch.int32
        assert np.array_equal(batch.block_tables.numpy(), tables.reshape(self.shape[0], rows, width))
        assert np.array_equal(batch.positions.numpy(), lengths.reshape(self.shape[0], rows) - 1)
        for layer in range(self.shape[0]):
            for row, (table, length) in enumerate(
                zip(batch.block_tables[layer].tolist(), lengths[layer].reshape(-1).tolist(), strict=True)
            ):
                newest = max(length - 1, 0)  # of a head without any KV, the slot of the first to come
                slot = table[newest // self.size] * self.size + newest % self.size
                assert batch.slots[layer, row].item() == slot

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def slots(self, data: st.DataObject) -> None:
        indices = self.draw_indices(data)
        at = indices if len(indices) > 1 else indices[0]
        slots, lengths = self.tables.slots_of(at), np.stack([self.lengths[index] for index in indices])
        batched = slots.view(len(indices), *slots.shape[-3:])
        assert slots.shape[-1] == lengths.max() and slots.dtype == torch.int64
        assert slots.dim() == (4 if len(indices) > 1 else 3)
        assert np.array_equal(self.tables.lengths_of(at).numpy().reshape(lengths.shape), lengths)
        for where in np.ndindex(lengths.shape):
            table = self.tables.tables[(indices[where[0]], *where[1:])].tolist()
            length = int(lengths[where])
            wanted = [table[k // self.size] * self.size + k % self.size for k in range(length)]
            assert batched[where].tolist() == wanted + [-1] * (slots.shape[-1] - length)

    @rule()
    def flush(self) -> None:
        self.tables.flush()

    @invariant()
    def no_page_in_two_tables(self) -> None:
        pages: list[int] = []
        for index, lengths in self.lengths.items():
            assert np.array_equal(self.tables.lengths[index], lengths)
            held = np.arange(self.tables.tables.shape[-1]) < self.pages[index][..., None]
            assert (self.tables.tables[index][~held] == 0).all()
            pages += self.tables.tables[index][held].tolist()
        assert len(set(pages)) == len(pages) == self.pool.num_used_pages

    def teardown(self) -> None:
        for index in list(getattr(self, "lengths", ())):
            self.tables.close(index)
            del self.lengths[index]
        if hasattr(self, "blocks"):
            assert self.blocks.num_free_blocks == self.blocks.num_usable_blocks


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=20),
)
def test_pages_come_just_in_time(lengths: list[int], steps: list[tuple[bool, int]]) -> None:
    """A head has pages for all of its KVs, and for those that the last `reserve` announced, but no others."""
    tables = HeadTables(HeadPagePool(BlockManager(120, 3), 1, 2), 1, 2, 3, 200, CPU)
    index = tables.open(np.array([lengths]))
    pages = [-(-length // 3) for length in lengths]
    for reserve, n in steps:
        assert (tables.reserve if reserve else tables.append)(index, n)
        pages = [max(had, -(-(length + n) // 3)) for had, length in zip(pages, lengths, strict=True)]
        lengths = lengths if reserve else [length + n for length in lengths]
        assert tables.pool.num_used_pages == sum(pages)
        assert (tables.tables[index, 0] > 0).sum(-1).tolist() == pages
        assert tables.lengths[index].tolist() == [lengths]


def test_what_a_batch_was_given_stays_as_it_was() -> None:
    """The next step's tables are made while this step's may still be read."""
    blocks = BlockManager(20, 2)
    tables = HeadTables(HeadPagePool(blocks, 1, 2), 1, 2, 2, MAX_LEN, CPU)
    index = tables.open(np.array([[2, 3]]))
    batch = tables.decode_batch([index])
    kept = [tensor.clone() for tensor in (batch.block_tables, batch.positions, batch.slots)]
    tables.append(index, 5)
    tables.decode_batch([index])
    tables.close(index)
    tables.open(np.array([[4, 4]]))
    tables.flush()
    for tensor, before in zip((batch.block_tables, batch.positions, batch.slots), kept, strict=True):
        assert torch.equal(tensor, before)


def test_what_heads_free_at_their_ends_is_whole_blocks() -> None:
    """Blocks are what prompts need: a request's pages that are left over in many of them could not be used."""
    blocks = BlockManager(40, 2)
    tables = HeadTables(HeadPagePool(blocks, 2, 3), 2, 3, 2, MAX_LEN, CPU)
    index = tables.open(np.full((2, 3), 12))
    assert blocks.num_free_blocks == blocks.num_usable_blocks - 6
    for pages in (5, 3, 1):
        tables.shrink(index, np.full((2, 3), 2 * pages))
        assert blocks.num_free_blocks == blocks.num_usable_blocks - pages


def test_an_index_that_is_used_again() -> None:
    """Beside a longer request, whose tables are wide enough to show what is left of the one before it."""
    tables = HeadTables(HeadPagePool(BlockManager(40, 2), 1, 2), 1, 2, 2, MAX_LEN, CPU, 2)
    longer, first = tables.open(np.array([[20, 20]])), tables.open(np.array([[12, 9]]))
    tables.flush()
    tables.close(first)
    tables.flush()
    second = tables.open(np.array([[3, 1]]))
    assert second == first
    batch = tables.decode_batch([second, longer])
    assert np.array_equal(batch.block_tables[0].numpy(), tables.tables[[second, longer], 0].reshape(4, -1)[:, :10])
    assert (batch.block_tables[0, :2] > 0).sum(-1).tolist() == [2, 1]


def test_what_happened_between_two_flushes() -> None:
    tables = HeadTables(HeadPagePool(BlockManager(40, 2), 1, 2), 1, 2, 2, MAX_LEN, CPU, 2)
    index = tables.open(np.array([[2, 3]]))
    tables.flush()
    tables.append(index, 3)
    tables.append(index)
    assert tables.lengths_of(index).tolist() == [[6, 7]]
    tables.append(index)
    tables.shrink(index, np.array([[1, 5]]))
    tables.append([index], 2)
    assert tables.lengths_of([index]).tolist() == [[[3, 7]]]
    assert np.array_equal(tables.decode_batch([index]).block_tables[0].numpy(), tables.tables[index, 0][:, :4])


def test_more_than_max_len() -> None:
    tables = HeadTables(HeadPagePool(BlockManager(90, 2), 1, 1), 1, 1, 2, MAX_LEN, CPU)
    with pytest.raises(ValueError, match=f"max_len={MAX_LEN}"):
        tables.open(np.array([[MAX_LEN + 1]]))
    with pytest.raises(RuntimeError, match="not open"):
        tables.close(PADDING)


def test_an_empty_batch_appends_nothing() -> None:
    tables = HeadTables(HeadPagePool(BlockManager(3, 2), 1, 1), 1, 1, 2, MAX_LEN, CPU)
    assert tables.can_append([], 1) and tables.append([], 1)
