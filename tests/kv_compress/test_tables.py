"""Tables and lengths on the host and on the device: always those of a plain model, and no page in two tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks
from vllm_blend.kv_compress.pages import HeadPagePool
from vllm_blend.kv_compress.tables import PADDING, HeadTables

CPU = torch.device("cpu")
MAX_LEN = 40


class Requests(RuleBasedStateMachine):
    """Requests that come with heads of any lengths, grow, shrink and leave; `lengths` is what they should have."""

    @initialize(
        num_blocks=st.integers(2, 30),
        layers=st.integers(1, 2),
        heads=st.integers(1, 3),
        block_size=st.integers(1, 4),
    )
    def start(self, num_blocks: int, layers: int, heads: int, block_size: int) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.pool = HeadPagePool(self.blocks, layers, heads)
        self.tables = HeadTables(self.pool, layers, heads, block_size, MAX_LEN, CPU)
        self.shape, self.size = (layers, heads), block_size
        self.lengths: dict[int, np.ndarray] = {}

    def pages_of(self, lengths: np.ndarray) -> int:
        return int(sum(-(-length // self.size) for length in lengths.reshape(-1).tolist()))

    def draw_lengths(self, data: st.DataObject, most: np.ndarray) -> np.ndarray:
        return np.array([data.draw(st.integers(0, int(m))) for m in most.reshape(-1)], np.int64).reshape(self.shape)

    @rule(data=st.data(), most=st.integers(0, MAX_LEN))
    def open(self, data: st.DataObject, most: int) -> None:
        lengths = self.draw_lengths(data, np.full(self.shape, most))
        free = self.pool.num_free_pages
        if self.pages_of(lengths) > free:
            with pytest.raises(OutOfBlocks):
                self.tables.open(lengths)
            assert self.pool.num_free_pages == free
            return
        index = self.tables.open(lengths)
        assert index not in self.lengths and index != PADDING
        self.lengths[index] = lengths
        assert self.pool.num_free_pages == free - self.pages_of(lengths)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), each=st.booleans())
    def append(self, data: st.DataObject, each: bool) -> None:
        indices = data.draw(st.lists(st.sampled_from(sorted(self.lengths)), unique=True, min_size=1))
        counts = [data.draw(st.integers(0, 6)) for _ in indices] if each else [data.draw(st.integers(0, 6))]
        counts = counts if each else counts * len(indices)
        grown = {index: self.lengths[index] + n for index, n in zip(indices, counts, strict=True)}
        n = counts if each else counts[0]
        if max(int(lengths.max()) for lengths in grown.values()) > MAX_LEN:
            with pytest.raises(ValueError, match="max_len"):
                self.tables.append(indices, n)
            return
        needed = sum(self.pages_of(grown[index]) - self.pages_of(self.lengths[index]) for index in indices)
        free = self.pool.num_free_pages
        fits = needed <= free
        assert self.tables.can_append(indices, n) == fits
        at = indices[0] if len(indices) == 1 else indices
        assert self.tables.append(at, n if not each or len(indices) > 1 else n[0]) == fits
        assert self.pool.num_free_pages == free - needed * fits
        self.lengths |= grown if fits else {}

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
        self.prefixes_stay(index, before)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.lengths)))
        lengths = self.draw_lengths(data, self.lengths[index])
        with pytest.raises(ValueError, match=f"index {index}"):
            self.tables.shrink(index, self.lengths[index] + 1)
        free, before = self.pool.num_free_pages, self.tables.tables[index].copy()
        freed = self.tables.shrink(index, lengths)
        assert freed == self.pages_of(self.lengths[index]) - self.pages_of(lengths)
        assert self.pool.num_free_pages == free + freed
        self.lengths[index] = lengths
        self.prefixes_stay(index, before)

    def prefixes_stay(self, index: int, before: np.ndarray) -> None:
        counts = -(-self.lengths[index] // self.size)
        kept = np.arange(before.shape[-1]) < counts[..., None]
        assert (self.tables.tables[index] == np.where(kept, before, 0)).all()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.lengths)))
        assert self.tables.close(index) == self.pages_of(self.lengths.pop(index))
        with pytest.raises(RuntimeError, match=f"index {index} is not open"):
            self.tables.close(index)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """What the device is given: one row for each head of each request, and padding."""
        indices = data.draw(st.lists(st.sampled_from([PADDING, *sorted(self.lengths)]), min_size=1))
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
                newest = length - 1
                slot = table[newest // self.size] * self.size + newest % self.size if length else 0
                assert batch.slots[layer, row].item() == slot

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def slots(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.lengths)))
        slots, lengths = self.tables.slots_of(index), self.lengths[index]
        assert slots.shape == (*self.shape, int(lengths.max())) and slots.dtype == torch.int64
        for layer in range(self.shape[0]):
            for head in range(self.shape[1]):
                table = self.tables.tables[index, layer, head].tolist()
                length = int(lengths[layer, head])
                wanted = [table[k // self.size] * self.size + k % self.size for k in range(length)]
                assert slots[layer, head].tolist() == wanted + [-1] * (slots.shape[2] - length)

    @rule()
    def flush(self) -> None:
        self.tables.flush()

    @invariant()
    def no_page_in_two_tables(self) -> None:
        pages: list[int] = []
        for index, lengths in self.lengths.items():
            assert np.array_equal(self.tables.lengths[index], lengths)
            counts = -(-lengths // self.size)
            held = np.arange(self.tables.tables.shape[-1]) < counts[..., None]
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


def test_more_than_max_len() -> None:
    tables = HeadTables(HeadPagePool(BlockManager(90, 2), 1, 1), 1, 1, 2, MAX_LEN, CPU)
    with pytest.raises(ValueError, match=f"max_len={MAX_LEN}"):
        tables.open(np.array([[MAX_LEN + 1]]))
    with pytest.raises(RuntimeError, match="not open"):
        tables.close(PADDING)


def test_an_empty_batch_appends_nothing() -> None:
    tables = HeadTables(HeadPagePool(BlockManager(3, 2), 1, 1), 1, 1, 2, MAX_LEN, CPU)
    assert tables.can_append([], 1) and tables.append([], 1)
