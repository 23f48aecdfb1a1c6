"""Eviction in the cache itself, from ordinary blocks to head pages and again in head pages: nothing that stays is lost,
changed or doubled, and nothing of anybody else is touched."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv_compress.worlds import ALLOCATIONS
from vllm_blend.core.block_manager import BlockManager
from vllm_blend.kv_compress.evictions import Evictions, schedule_evictions
from vllm_blend.kv_compress.moves import CacheMoves, schedule_moves
from vllm_blend.kv_compress.pages import HeadPagePool
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.worker.cache_engine import CacheEngine
from vllm_blend.worker.kv_cache import KVCache

CPU = torch.device("cpu")
DIM = 2
KV = tuple[float, ...]  # metric, position, K and V
Content = list[list[KV]]
Number = int | torch.Tensor


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    block_size: int
    num_blocks: int


SHAPES = st.builds(Shape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.just(40))


class Store:
    """A pool of blocks with everything that keeps head pages in it; memory starts out as noise."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        size = (shape.layers, shape.num_blocks, shape.block_size, shape.heads, DIM)
        self.cache = KVCache(self.noise(*size), self.noise(*size))
        self.engine = CacheEngine(self.cache)
        self.engine.metric.copy_(self.noise(*self.engine.metric.shape))
        self.engine.position.fill_(-7)
        self.blocks = BlockManager(shape.num_blocks, shape.block_size)
        self.pool = HeadPagePool(self.blocks, shape.layers, shape.heads)
        self.tables = HeadTables(self.pool, shape.layers, shape.heads, shape.block_size, 1000, CPU)
        self.metrics: dict[int, torch.Tensor] = {}

    def noise(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator)

    def prefill(self, n: int) -> tuple[list[int], torch.Tensor]:
        """A prompt of n tokens in ordinary blocks, whose content is noise already; its block table and metrics."""
        metric = self.noise(self.shape.layers, self.shape.heads, n)
        return self.blocks.allocate(self.blocks.blocks_for(n)), metric

    def adopt(self, table: list[int], metric: torch.Tensor, evictions: Evictions) -> int:
        """Move what stays of a prompt from ordinary blocks into head pages."""
        n = metric.shape[2]
        survivors = self.engine.gather(
            torch.tensor(table, dtype=torch.int32), ~evictions.evicted, metric, torch.arange(n)
        )
        self.blocks.release(table)
        index = self.tables.open(survivors.lengths.numpy())
        self.engine.store(survivors, self.tables.slots_of(index))
        return index

    def decode(self, index: int, position: int) -> bool:
        """One more token of a request in head pages; whether there was room."""
        if not self.tables.append(index):
            return False
        batch = self.tables.decode_batch([index])
        self.engine.head_keys.view(-1, DIM)[batch.slots] = self.noise(*batch.slots.shape, DIM)
        self.engine.head_values.view(-1, DIM)[batch.slots] = self.noise(*batch.slots.shape, DIM)
        self.engine.enter(batch.slots, torch.tensor([position]).expand(self.shape.heads))
        self.engine.metric.view(-1)[batch.slots] += self.noise(*batch.slots.shape)
        return True

    def compress(
        self, at: int | list[int], num_blocks: Number, sinks: int, protected_from: Number, allocation: str
    ) -> Evictions:
        """Evict from one request in head pages, or several at once; what becomes free is what was promised."""
        slots, lengths = self.tables.slots_of(at), self.tables.lengths_of(at)
        metric, positions = self.engine.read(slots)
        limits = (num_blocks, sinks, protected_from, self.shape.block_size, allocation)
        evictions = schedule_evictions(metric, positions, lengths, *limits)  # type: ignore[arg-type]
        moves, new_lengths = schedule_moves(evictions, lengths, slots)
        assert len(moves) == len(moves.source) == len(moves.target)
        assert len(set(moves.target.tolist())) == len(moves)  # unique
        assert not set(moves.target.tolist()) & set(moves.source.tolist())
        self.engine.execute_cache_moves(moves)
        free = self.pool.num_free_pages
        assert self.tables.shrink(at, new_lengths.numpy()) == evictions.num_blocks.sum()
        assert self.pool.num_free_pages == free + evictions.num_blocks.sum()
        return evictions

    def content(self, index: int) -> Content:
        """All KVs of a request, head by head of all layers, in the order of their slots."""
        slots = self.tables.slots_of(index).flatten(0, 1)
        metric, positions = self.engine.read(slots)
        assert (metric[slots < 0] == 0).all() and (positions[slots < 0] == -1).all()
        keys, values = (pages.view(-1, DIM)[slots] for pages in (self.engine.head_keys, self.engine.head_values))
        packed = torch.cat([metric[..., None], positions[..., None].float(), keys, values], -1)
        return [[tuple(kv) for kv in kvs[real].tolist()] for kvs, real in zip(packed, slots >= 0, strict=True)]


def survivors_of(content: Content, evictions: Evictions) -> Content:
    gone = evictions.evicted.flatten(0, 1).tolist()
    return [
        [kv for kv, goes in zip(kvs, head, strict=False) if not goes] for kvs, head in zip(content, gone, strict=True)
    ]


def unordered(content: Content) -> list[Counter[KV]]:
    return [Counter(kvs) for kvs in content]


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.data(), st.integers(0, 1000))
def test_from_blocks_to_head_pages(shape: Shape, data: st.DataObject, seed: int) -> None:
    store = Store(shape, seed)
    n = data.draw(st.integers(1, 20))
    table, metric = store.prefill(n)
    lengths = torch.full((shape.layers, shape.heads), n)
    positions = torch.arange(n).expand(*metric.shape)
    evictions = schedule_evictions(
        metric,
        positions,
        lengths,
        data.draw(st.integers(0, 30)),
        data.draw(st.integers(0, 3)),
        n - data.draw(st.integers(0, min(n, 3))),
        shape.block_size,
        data.draw(st.sampled_from(ALLOCATIONS)),
    )
    wanted: Content = []  # read from the ordinary blocks, one KV after another
    for layer, head in product(range(shape.layers), range(shape.heads)):
        kvs: list[KV] = []
        for token in range(n):
            where = (layer, table[token // shape.block_size], token % shape.block_size, head)
            numbers = (metric[layer, head, token], token, *store.cache.key[where], *store.cache.value[where])
            kvs.append(tuple(map(float, numbers)))
        wanted.append(kvs)
    index = store.adopt(table, metric, evictions)
    assert store.content(index) == survivors_of(wanted, evictions)
    pages = -(-store.tables.lengths[index] // shape.block_size)
    assert store.pool.num_used_pages == pages.sum()
    store.tables.close(index)
    assert store.blocks.num_free_blocks == shape.num_blocks - 1


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.data(), st.integers(0, 1000))
def test_eviction_while_decoding(shape: Shape, data: st.DataObject, seed: int) -> None:
    """Requests grow and are compressed in turns, in one store: each keeps exactly what it should, whatever the others
    do, and an ordinary block beside them stays as it is."""
    store = Store(shape, seed)
    bystander = store.blocks.allocate(1)
    untouched = [tensor[:, bystander].clone() for tensor in (store.cache.key, store.cache.value)]
    lengths_at_start = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    positions: dict[int, int] = {}
    known: dict[int, Content] = {}
    for n in lengths_at_start:
        table, metric = store.prefill(n)
        everything = torch.zeros_like(metric, dtype=torch.bool)
        kept = Evictions(everything, torch.zeros(shape.layers, shape.heads, dtype=torch.int64))
        index = store.adopt(table, metric, kept)
        positions[index], known[index] = n, store.content(index)
    for _ in range(data.draw(st.integers(1, 8))):
        index = data.draw(st.sampled_from(sorted(positions)))
        if data.draw(st.booleans()):
            first = positions[index]
            for _ in range(data.draw(st.integers(1, 4))):
                positions[index] += store.decode(index, positions[index])
            grown = store.content(index)
            for before, after in zip(known[index], grown, strict=True):
                assert after[: len(before)] == before
                assert [kv[1] for kv in after[len(before) :]] == [*range(first, positions[index])]
            known[index] = grown
        else:
            evictions = store.compress(
                index,
                data.draw(st.integers(0, 12)),
                data.draw(st.integers(0, 2)),
                positions[index] - data.draw(st.integers(0, 3)),
                data.draw(st.sampled_from(ALLOCATIONS)),
            )
            assert unordered(store.content(index)) == unordered(survivors_of(known[index], evictions))
            known[index] = store.content(index)
        for other, content in known.items():
            assert store.content(other) == content
    for tensor, before in zip((store.cache.key, store.cache.value), untouched, strict=True):
        assert torch.equal(tensor[:, bystander], before)
    for index in positions:
        store.tables.close(index)
    assert store.blocks.num_free_blocks == shape.num_blocks - 2


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_requests_together_equal_each_alone(allocation: str, order: tuple[int, int]) -> None:
    shape = Shape(2, 2, 4, 40)
    prompts, budgets, windows = (23, 14), (9, 5), (4, 6)

    def start(store: Store, which: tuple[int, ...]) -> dict[int, int]:
        """Prompts whose content depends on nothing but which they are."""
        indices = {}
        for request in which:
            n = prompts[request]
            generator = torch.Generator().manual_seed(100 + request)
            index = store.tables.open(torch.full((shape.layers, shape.heads), n).numpy())
            slots = store.tables.slots_of(index)
            for tensor in (store.engine.head_keys, store.engine.head_values):
                tensor.view(-1, DIM)[slots] = torch.randn(*slots.shape, DIM, generator=generator)
            store.engine.enter(slots.flatten(1), torch.arange(n).repeat(shape.heads))
            store.engine.metric.view(-1)[slots] = torch.randn(*slots.shape, generator=generator)
            indices[request] = index
        return indices

    alone = {}
    for request in (0, 1):
        store = Store(shape, seed=request)
        index = start(store, (request,))[request]
        store.compress(index, budgets[request], 1, prompts[request] - windows[request], allocation)
        alone[request] = store.content(index)
        assert sum(map(len, alone[request])) < prompts[request] * shape.layers * shape.heads
    store = Store(shape, seed=9)
    indices = start(store, order)
    at = [indices[request] for request in order]
    num_blocks = torch.tensor([budgets[request] for request in order])
    protected_from = torch.tensor([prompts[request] - windows[request] for request in order])
    store.compress(at, num_blocks, 1, protected_from, allocation)
    for request in order:
        assert store.content(indices[request]) == alone[request]


def test_moves_are_read_before_they_are_written() -> None:
    store = Store(Shape(1, 1, 4, 3), seed=0)
    keys, metric = store.engine.head_keys.view(-1, DIM), store.engine.metric.view(-1)
    before = keys.clone(), metric.clone()
    store.engine.execute_cache_moves(CacheMoves(torch.tensor([4, 5, 6]), torch.tensor([5, 6, 4])))
    for tensor, old in zip((keys, metric), before, strict=True):
        assert torch.equal(tensor[[5, 6, 4]], old[[4, 5, 6]]) and torch.equal(tensor[7:], old[7:])
    store.engine.execute_cache_moves(CacheMoves(torch.empty(0).long(), torch.empty(0).long()))


def test_more_slots_than_survivors() -> None:
    store = Store(Shape(2, 1, 4, 9), seed=0)
    table, metric = store.prefill(6)
    survivors = store.engine.gather(torch.tensor(table), metric > -9, metric, torch.arange(6))
    index = store.tables.open(torch.tensor([[6], [7]]).numpy())
    before = store.cache.key.clone()
    with pytest.raises(RuntimeError, match="12 KVs do not go into 13 slots"):
        store.engine.store(survivors, store.tables.slots_of(index))
    assert torch.equal(store.cache.key, before)


def test_bytes_beside_keys_and_values() -> None:
    engine = Store(Shape(3, 2, 4, 9), seed=0).engine
    size = sum(tensor.numel() * tensor.itemsize for tensor in (engine.metric, engine.position))
    assert size == 9 * CacheEngine.bytes_per_block(3, 4, 2)
