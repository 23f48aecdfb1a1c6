"""Eviction in the cache itself, from ordinary blocks to head pages and again in head pages: nothing that stays is lost,
changed or doubled, and no other request's KV is touched."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.features.kv_compress.store import KV, Content, Shape, Store
from tests.features.kv_compress.worlds import ALLOCATIONS
from vllm_blend.features.kv_compress.cache_engine import CacheEngine
from vllm_blend.features.kv_compress.evictions import Evictions, schedule_evictions
from vllm_blend.features.kv_compress.moves import CacheMoves

SHAPES = st.builds(Shape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.just(40))


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
    bystander, _ = store.prefill(1)
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
    for tensor, was in zip((store.cache.key, store.cache.value), untouched, strict=True):
        assert torch.equal(tensor[:, bystander], was)
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
            for pages in (store.keys, store.values):
                pages[slots] = torch.randn(*slots.shape, shape.head_dim, generator=generator)
            store.engine.record_new(slots.flatten(1), torch.arange(n).repeat(shape.heads), 0.0)
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
    keys, metric = store.keys, store.engine.metric.view(-1)
    for tensor in (keys, store.values, metric):
        tensor.copy_(store.noise(*tensor.shape))
    before = keys.clone(), metric.clone()
    store.engine.execute_cache_moves(CacheMoves(torch.tensor([4, 5, 6]), torch.tensor([5, 6, 4])))
    for tensor, old in zip((keys, metric), before, strict=True):
        assert torch.equal(tensor[[5, 6, 4]], old[[4, 5, 6]]) and torch.equal(tensor[7:], old[7:])
    store.engine.execute_cache_moves(CacheMoves(torch.empty(0).long(), torch.empty(0).long()))


def test_more_slots_than_survivors() -> None:
    store = Store(Shape(2, 1, 4, 9), seed=0)
    table, metric = store.prefill(6)
    survivors = store.engine.gather(torch.tensor(table), metric > -9, metric, torch.arange(6), 12)
    index = store.tables.open(np.array([[6], [7]]))
    with pytest.raises(RuntimeError, match="12 KVs do not go into 13 slots"):
        store.engine.store(survivors, store.tables.slots_of(index))
    assert store.keys[store.tables.slots_of(index)].isnan().all()  # nothing was written


def test_bytes_beside_keys_and_values() -> None:
    engine = Store(Shape(3, 2, 4, 9), seed=0).engine
    size = sum(tensor.numel() * tensor.itemsize for tensor in (engine.metric, engine.position))
    assert size == 9 * CacheEngine.bytes_per_block(3, 4, 2)
