from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.cpu import MemoryChunkStore

TOKEN_BYTES = 2 * 3 * 2 * 4  # K and V, three layers, two heads of one float32


def chunk(tokens: int) -> ChunkKV:
    kv = torch.full((3, tokens, 2, 1), float(tokens))
    return ChunkKV(kv, -kv)


class Budgeted(RuleBasedStateMachine):
    """The store against a plain ordered dict, oldest use first."""

    @initialize(budget=st.integers(1, 12 * TOKEN_BYTES))
    def start(self, budget: int) -> None:
        self.store = MemoryChunkStore(budget)
        self.budget = budget
        self.expected: OrderedDict[str, ChunkKV] = OrderedDict()
        self.hits = self.misses = 0

    @rule(key=st.sampled_from("abcdef"), tokens=st.integers(1, 14))
    def put(self, key: str, tokens: int) -> None:
        kv = chunk(tokens)
        assert kv.nbytes == tokens * TOKEN_BYTES
        self.store.put(key, kv)
        self.expected.pop(key, None)
        if kv.nbytes <= self.budget:
            self.expected[key] = kv
            while sum(each.nbytes for each in self.expected.values()) > self.budget:
                self.expected.popitem(last=False)

    @rule(key=st.sampled_from("abcdef"))
    def get(self, key: str) -> None:
        found = self.store.get(key)
        assert found is self.expected.get(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self.expected.move_to_end(key)

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
        assert self.store.num_bytes == sum(each.nbytes for each in self.expected.values()) <= self.budget
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


def test_pinned_chunks_stay() -> None:
    """And what only they could make room for is not kept."""
    store = MemoryChunkStore(10 * TOKEN_BYTES)
    for key in "abc":
        store.put(key, chunk(3))
    store.pin("a")
    store.pin("a")
    store.pin("later")
    store.put("d", chunk(4))
    assert [key in store for key in "abcd"] == [True, False, True, True]
    assert store.room == 7 * TOKEN_BYTES
    store.put("e", chunk(8))
    assert "e" not in store and "a" in store
    store.unpin("a")
    assert store.room == 7 * TOKEN_BYTES
    store.unpin("a")
    store.put("e", chunk(8))
    assert "e" in store and "a" not in store
    store.put("later", chunk(1))
    assert store.bytes_of("later") == TOKEN_BYTES and store.room == 9 * TOKEN_BYTES
    store.put("f", chunk(9))
    assert "later" in store and "e" not in store and store.bytes_of("e") == 0
