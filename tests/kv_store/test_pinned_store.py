"""The store over an arena. Its memory need not be pinned for that: tests/gpu/test_pinned.py has the copies of a GPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.host_memory import PAGE, Arena, piece_bytes
from vllm_blend.kv_store.memory import MemoryChunkStore
from vllm_blend.kv_store.pinned_memory import PinnedChunkStore, make_chunk_store
from vllm_blend.kv_store.transfer import InFlight

PAGES = 24
CPU = torch.device("cpu")


def chunk(tokens: int, value: float) -> ChunkKV:
    kv = torch.full((3, tokens, 2, 8), value) + torch.arange(3.0).view(3, 1, 1, 1)
    return ChunkKV(kv, -kv)


def store_of(pages: int) -> PinnedChunkStore:
    return PinnedChunkStore(Arena(np.zeros(pages * PAGE, np.uint8)), InFlight())


class Event:
    """Stands for the end of a copy."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class Budgeted(RuleBasedStateMachine):
    """Chunks that requests hold stay whole, wherever the store puts others; what the store counts is what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.store = store_of(PAGES)
        self.held: list[tuple[ChunkKV, ChunkKV]] = []  # as requests hold them, and what they must contain
        self.value = 0.0

    @rule(key=st.sampled_from("abcdef"), tokens=st.integers(1, 300), hold=st.booleans())
    def put(self, key: str, tokens: int, hold: bool) -> None:
        self.value += 1
        given = chunk(tokens, self.value)
        kept = self.store.put(key, given)
        assert kept.k.data_ptr() != given.k.data_ptr()
        assert torch.equal(kept.k, given.k)
        assert torch.equal(kept.v, given.v)
        fits = piece_bytes(given.nbytes) <= self.store.budget_bytes
        if fits and not self.held:
            assert self.store.get(key) is kept
        if hold:
            self.held.append((kept, given))

    @rule(key=st.sampled_from("abcdef"), hold=st.booleans())
    def get(self, key: str, hold: bool) -> None:
        found = self.store.get(key)
        if found is not None and hold:
            self.held.append((found, found.copy()))

    @rule(key=st.sampled_from("abcdef"))
    def remove(self, key: str) -> None:
        self.store.remove(key)
        assert key not in self.store

    @rule()
    def clear(self) -> None:
        self.store.clear()

    @precondition(lambda self: self.held)
    @rule()
    def finish_request(self) -> None:
        self.held.pop(0)

    @precondition(lambda self: self.held)
    @rule()
    def copy_from_it(self) -> None:
        self.store.in_flight.hold(Event(), self.held.pop(0))

    @invariant()
    def held_chunks_are_whole(self) -> None:
        for mine, expected in self.held:
            assert torch.equal(mine.k, expected.k)
            assert torch.equal(mine.v, expected.v)

    @invariant()
    def bytes_are_counted(self) -> None:
        kept = [piece_bytes(each.chunk.nbytes) for each in self.store._chunks.values()]
        assert self.store.num_bytes == sum(kept) <= self.store.arena.num_bytes_used <= self.store.budget_bytes


TestBudgeted = Budgeted.TestCase
TestBudgeted.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_layer_lies_in_one_piece() -> None:
    kept = store_of(8).put("a", chunk(10, 1.0))
    row = 10 * 2 * 8
    assert kept.k.stride() == kept.v.stride() == (2 * row, 16, 8, 1)
    assert kept.v.data_ptr() - kept.k.data_ptr() == row * 4


def test_the_least_recently_used_leave_until_there_is_room() -> None:
    store = store_of(3)
    for key in "abc":
        store.put(key, chunk(10, 1.0))  # a page each
    assert store.get("a") is not None
    store.put("d", chunk(20, 1.0))  # two pages
    assert [key for key in "abcd" if key in store] == ["a", "d"]
    assert store.num_bytes == 3 * PAGE


def test_what_is_copied_keeps_its_memory_until_the_copy_is_over() -> None:
    store, event = store_of(1), Event()
    kept = store.put("a", chunk(10, 1.0))
    address = kept.k.data_ptr()
    store.in_flight.hold(event, kept)
    del kept
    store.remove("a")
    assert store.arena.num_bytes_used == PAGE
    again = store.put("b", chunk(10, 2.0))  # waits: there is no other memory
    assert event.done
    assert again.k.data_ptr() == address


def test_without_room_a_chunk_is_usable_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(2)
    held = store.put("a", chunk(20, 1.0))
    with caplog.at_level(logging.WARNING):
        for key in "bc":
            other = store.put(key, chunk(20, 2.0))
            assert torch.equal(other.v, chunk(20, 2.0).v)
            assert key not in store
    assert torch.equal(held.k, chunk(20, 1.0).k)
    assert store.num_unpinned == 2
    assert [record.message for record in caplog.records if "blend_chunk_cache_gib" in record.message] != []
    assert len(caplog.records) == 1
    del held
    store.put("d", chunk(20, 3.0))
    assert "d" in store


def test_a_chunk_above_the_budget_evicts_nothing() -> None:
    store = store_of(2)
    store.put("a", chunk(10, 1.0))
    store.put("b", chunk(400, 1.0))
    assert "a" in store
    assert "b" not in store


def test_replacing_a_chunk_counts_it_once() -> None:
    store = store_of(4)
    for value in (1.0, 2.0):
        store.put("a", chunk(10, value))
    found = store.get("a")
    assert found is not None
    assert float(found.k[0, 0, 0, 0]) == 2.0
    assert store.num_bytes == store.arena.num_bytes_used == PAGE


def test_an_engine_on_the_cpu_keeps_chunks_in_plain_memory() -> None:
    store = make_chunk_store(10**6, CPU, CPU, InFlight())
    assert type(store) is MemoryChunkStore
    given = chunk(3, 1.0)
    assert store.put("a", given).k is given.k


def test_in_flight_lets_go_of_what_is_finished() -> None:
    in_flight, first, second = InFlight(), Event(), Event()
    in_flight.hold(first, "a")
    in_flight.hold(second, "b")
    second.done = True
    in_flight.release()
    assert not first.done
    assert in_flight.wait()
    assert first.done
    assert not in_flight.wait()
