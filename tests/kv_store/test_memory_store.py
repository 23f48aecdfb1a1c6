from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.memory import MemoryChunkStore

TOKEN_BYTES = 2 * 3 * 2 * 4  # K and V, three layers, two heads of one float32


def chunk(tokens: int) -> ChunkKV:
    kv = torch.full((3, tokens, 2, 1), float(tokens))
    return ChunkKV(kv, -kv)


class Budgeted(RuleBasedStateMachine):
    """The store against a dict that is looked through: key -> chunk, uses, worth, when it was used last."""

    @initialize(budget=st.integers(1, 12 * TOKEN_BYTES))
    def start(self, budget: int) -> None:
        self.store = MemoryChunkStore(budget)
        self.budget = budget
        self.expected: dict[str, list[Any]] = {}
        self.clock, self.now = 0.0, 0
        self.hits = self.misses = 0

    def use(self, key: str) -> None:
        entry = self.expected[key]
        entry[1] += 1
        entry[2] = self.clock + entry[1] * (entry[0].num_tokens ** 2 / entry[0].nbytes)
        self.now += 1
        entry[3] = self.now

    @rule(key=st.sampled_from("abcdef"), tokens=st.integers(1, 14))
    def put(self, key: str, tokens: int) -> None:
        kv = chunk(tokens)
        assert kv.nbytes == tokens * TOKEN_BYTES
        self.store.put(key, kv)
        self.expected.pop(key, None)
        if kv.nbytes <= self.budget:
            while sum(entry[0].nbytes for entry in self.expected.values()) + kv.nbytes > self.budget:
                least = min(self.expected, key=lambda key: self.expected[key][2:])
                self.clock = max(self.clock, self.expected.pop(least)[2])
            self.expected[key] = [kv, 0, 0.0, 0]
            self.use(key)

    @rule(key=st.sampled_from("abcdef"))
    def get(self, key: str) -> None:
        found = self.store.get(key)
        assert found is self.expected.get(key, [None])[0]
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self.use(key)

    @rule(key=st.sampled_from("abcdef"))
    def remove(self, key: str) -> None:
        self.store.remove(key)
        self.expected.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.expected.clear()

    @invariant()
    def same(self) -> None:
        assert self.store.num_bytes == sum(entry[0].nbytes for entry in self.expected.values()) <= self.budget
        assert len(self.store) == len(self.expected)
        assert all((key in self.store) == (key in self.expected) for key in "abcdef")
        assert (self.store.num_hits, self.store.num_misses) == (self.hits, self.misses)


TestBudgeted = Budgeted.TestCase
TestBudgeted.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_budget_below_one_byte_is_an_error() -> None:
    with pytest.raises(ValueError, match="budget_bytes=0"):
        MemoryChunkStore(0)


def test_chunk_kv_must_be_layers_by_tokens_by_heads() -> None:
    with pytest.raises(ValueError, match=r"\[3, 2, 4\].*layers, tokens"):
        ChunkKV(torch.zeros(3, 2, 4), torch.zeros(3, 2, 4))
    with pytest.raises(ValueError, match=r"\[1, 2, 2, 4\].*\[1, 3, 2, 4\]"):
        ChunkKV(torch.zeros(1, 2, 2, 4), torch.zeros(1, 3, 2, 4))


def test_what_is_used_often_outlives_what_comes_once() -> None:
    """It leaves once others have been asked for many times and it has not."""
    store = MemoryChunkStore(4 * TOKEN_BYTES)
    store.put("popular", chunk(1))
    for _ in range(9):
        assert store.get("popular") is not None
    for number in range(6):
        store.put(f"once {number}", chunk(1))
    assert "popular" in store and "once 5" in store and "once 0" not in store
    for number in range(40):
        store.put(f"later {number}", chunk(1))
    assert "popular" not in store and len(store) == 4


def test_many_uses_take_no_memory() -> None:
    store = MemoryChunkStore(4 * TOKEN_BYTES)
    for key in "abc":
        store.put(key, chunk(1))
    for _ in range(10_000):
        store.get("a")
    assert len(store._order._heaps[""]) < 100
    store.put("d", chunk(1))
    store.put("e", chunk(1))
    assert "a" in store and "b" not in store


def test_pinned_chunks_stay() -> None:
    """A chunk that needs their space is not kept."""
    store = MemoryChunkStore(10 * TOKEN_BYTES)
    for key in "abc":
        store.put(key, chunk(3))
    store.pin("a")
    store.pin("a")
    store.pin("later")
    store.put("d", chunk(4))
    assert [key in store for key in "abcd"] == [True, False, True, True]
    assert store.free_bytes == 7 * TOKEN_BYTES
    store.put("e", chunk(8))
    assert "e" not in store and "a" in store
    store.unpin("a")
    assert store.free_bytes == 7 * TOKEN_BYTES
    store.unpin("a")
    store.put("e", chunk(8))
    assert "e" in store and "a" not in store
    store.put("later", chunk(1))
    assert store.bytes_of("later") == TOKEN_BYTES and store.free_bytes == 9 * TOKEN_BYTES
    store.put("f", chunk(9))
    assert "later" in store and "e" not in store and store.bytes_of("e") == 0


ALL = (1.0, 1.0)  # of the budget may be retained


def test_retained_chunks_leave_after_all_others() -> None:
    """Those of the lowest level first, whatever their use. When their time has come, they are like any others."""
    now = 0.0
    store = MemoryChunkStore(3 * TOKEN_BYTES, now=lambda: now, quotas=ALL)
    for key, level in (("high", 9), ("low", 1), ("none", 0)):
        store.retain(key, level, 10)  # also before it is there
        store.put(key, chunk(1))
    for _ in range(5):
        store.get("none")
    store.put("other", chunk(1))
    assert [key in store for key in ("high", "low", "none")] == [True, True, False]
    store.put("large", chunk(2))
    assert "high" in store and "low" not in store
    now = 10.0
    store.put("next", chunk(1))
    assert "high" not in store and "large" in store
    store.retain("large", 5, 60)
    store.put("whole", chunk(3))  # retention is soft
    assert len(store) == 1 and "whole" in store
    store.retain("whole", 5, 60)
    store.retain("whole", 0, 60)
    store.put("last", chunk(1))
    assert len(store) == 1 and "last" in store


def test_retention_that_is_renewed_lasts_as_long_as_was_asked_for_last() -> None:
    now = 0.0
    store = MemoryChunkStore(2 * TOKEN_BYTES, now=lambda: now, quotas=ALL)
    store.retain("renewed", 1, 10)
    store.retain("renewed", 1, 20)
    for key in ("renewed", "other"):
        store.put(key, chunk(1))
    store.get("other")
    now = 10.0
    store.put("next", chunk(1))
    assert "renewed" in store and "other" not in store
    now = 20.0
    store.get("next")
    store.put("last", chunk(1))
    assert "renewed" not in store and "next" in store


def test_a_cleared_store_retains_nothing() -> None:
    store = MemoryChunkStore(TOKEN_BYTES, quotas=ALL)
    store.retain("a", 9, 1e6)
    store.put("a", chunk(1))
    store.clear()
    assert not store._retained and not store._expiries and store.num_bytes == 0


def test_retained_chunks_that_leave_do_not_advance_the_clock() -> None:
    """They may be of a far higher priority than the chunks that are not retained, which would then count as new."""
    store = MemoryChunkStore(3 * TOKEN_BYTES, quotas=ALL)
    store.retain("hot", 1, 1e6)
    store.put("hot", chunk(3))
    for _ in range(9):
        store.get("hot")
    store.put("large", chunk(3))
    assert "hot" not in store and store._clock == 0


def test_retention_takes_no_memory() -> None:
    now = 0.0
    store = MemoryChunkStore(4 * TOKEN_BYTES, now=lambda: now, quotas=ALL)
    for number in range(2000):
        now = float(number)
        store.retain("often", 1, 1e6)
        store.retain(f"short {number}", 1, 0.5)
        store.put(f"short {number}", chunk(1))
    assert len(store._expiries) < 200 and len(store._order._heaps[""]) < 100 and len(store._retained) < 10


def test_what_one_owner_retains_does_not_end_reuse_for_others() -> None:
    """Half of the memory is the most that one may retain, and three quarters all together. The rest is for what is
    used, and what was retained beyond a quota leaves as any other chunk does."""
    now = 0.0
    store = MemoryChunkStore(8 * TOKEN_BYTES, now=lambda: now)

    def fill(owner: str, count: int) -> None:
        for number in range(count):
            store.retain(f"{owner}{number}", 9, 60, owner)
            store.put(f"{owner}{number}", chunk(1))

    def kept(owner: str) -> int:
        return sum(f"{owner}{number}" in store for number in range(100))

    fill("greedy", 100)
    for _ in range(20):  # ordinary chunks have room beside them
        for key in ("x", "y", "z"):
            store.put(key, chunk(1))
            assert store.get(key) is not None
    assert all(key in store for key in ("x", "y", "z")) and kept("greedy") >= 4
    fill("other", 100)
    assert kept("other") >= 2 and kept("greedy") == 4
    for number in range(20):
        store.put(f"ordinary {number}", chunk(1))
    assert (kept("greedy"), kept("other"), len(store)) == (4, 2, 8)
    for number in range(4):  # what is given up counts no more
        store.retain(f"greedy{number}", 0, 0.0)
        store.remove(f"greedy{number}")
    fill("third", 3)
    for number in range(20):
        store.put(f"ordinary {number}", chunk(1))
    assert (kept("third"), kept("other")) == (3, 2)
    now = 60.0
    store.put("all is over", chunk(8))
    assert not store._counted and not store._counted_bytes.total() and len(store) == 1
