from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kv_store.tiers import SECONDS, FakeStorage, chunk, tier
from vllm_blend.engine.metrics import Metric
from vllm_blend.entrypoints.openai.metrics.engine_families import engine_families
from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.host_memory import PAGE, Arena
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.memory import MemoryChunkStore
from vllm_blend.kv_store.pinned_memory import PinnedChunkStore
from vllm_blend.kv_store.store_config import DiskStoreConfig
from vllm_blend.kv_store.tiered import Tier, TieredChunkStore
from vllm_blend.kv_store.tiers import ChunkLoad
from vllm_blend.kv_store.transfer import InFlight

BUDGET = 2000  # bytes: two chunks of ten tokens


class Tiers:
    def __init__(self, max_write_bytes: int = 1 << 20) -> None:
        self.disk, self.remote = FakeStorage(), FakeStorage()
        below = [tier("disk", self.disk, max_write_bytes), tier("remote", self.remote, max_write_bytes)]
        self.store = TieredChunkStore(MemoryChunkStore(BUDGET), below)


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    made = Tiers()
    yield made
    made.disk.gate.set()
    made.remote.gate.set()
    made.store.close(SECONDS)


def same(a: ChunkKV | None, b: ChunkKV) -> bool:
    return a is not None and torch.equal(a.k, b.k) and torch.equal(a.v, b.v)


def gauges(store: TieredChunkStore) -> dict[str, float]:
    return dict(store.gauges())


def test_what_is_put_reaches_every_tier(tiers: Tiers) -> None:
    kv = tiers.store.put("a", chunk(10))
    assert tiers.store.flush(SECONDS)
    assert tiers.store.get_now("a") is kv
    assert same(tiers.disk.chunks["a"], kv) and same(tiers.remote.chunks["a"], kv)


def test_what_memory_evicts_comes_back_from_the_disk(tiers: Tiers) -> None:
    for value, key in enumerate("abc"):
        tiers.store.put(key, chunk(10, value))
    assert tiers.store.flush(SECONDS)
    assert tiers.store.get_now("a") is None and "a" in tiers.store
    assert same(tiers.store.get("a"), chunk(10, 0))
    assert same(tiers.store.get_now("a"), chunk(10, 0)), "it was not kept"
    assert tiers.remote.num_reads == 0
    assert tiers.store.num_bytes <= BUDGET and len(tiers.store) == 2


def test_what_only_the_server_has_is_written_to_the_disk(tiers: Tiers) -> None:
    tiers.remote.chunks["a"] = chunk(10, 3)
    assert same(tiers.store.get("a"), chunk(10, 3))
    assert tiers.store.flush(SECONDS)
    assert same(tiers.disk.chunks["a"], chunk(10, 3))
    assert same(tiers.store.get_now("a"), chunk(10, 3))


def test_what_no_tier_has_is_a_miss_of_each(tiers: Tiers) -> None:
    assert tiers.store.get("a") is None and "a" not in tiers.store
    found = gauges(tiers.store)
    assert [found[f"{name}_misses"] for name in ("memory", "disk", "remote")] == [1, 1, 1]
    assert [found[f"{name}_hits"] for name in ("memory", "disk", "remote")] == [0, 0, 0]


def test_what_is_still_to_be_written_is_found(tiers: Tiers) -> None:
    tiers.disk.gate.clear()
    for value, key in enumerate("abc"):
        tiers.store.put(key, chunk(10, value))
    assert "a" not in tiers.store.memory and "a" not in tiers.disk.chunks
    assert same(tiers.store.get_now("a"), chunk(10, 0))


def test_a_slow_tier_delays_no_put_and_its_dropped_writes_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The first chunk is being written, the second waits, and there is no room for more."""
    tiers = Tiers(max_write_bytes=2 * 960)
    tiers.disk.gate.clear()
    with caplog.at_level(logging.WARNING):
        for value, key in enumerate("abcde"):
            tiers.store.put(key, chunk(10, value))
    assert tiers.remote.gate.is_set() and tiers.store.below[1].writer.flush(SECONDS)
    assert gauges(tiers.store)["disk_writes_dropped"] == 3
    assert [record.levelname for record in caplog.records if "disk tier" in record.message] == ["WARNING"]
    assert not tiers.store.flush(0.01)
    tiers.disk.gate.set()
    assert tiers.store.flush(SECONDS)
    assert set(tiers.disk.chunks) == set("ab")


def test_a_chunk_larger_than_the_queue_is_written_alone() -> None:
    tiers = Tiers(max_write_bytes=1)
    tiers.store.put("a", chunk(10))
    assert tiers.store.flush(SECONDS)
    assert set(tiers.disk.chunks) == {"a"}


def test_a_write_that_fails_is_counted_and_the_next_one_is_done(tiers: Tiers) -> None:
    tiers.disk.error = RuntimeError("the disk is on fire")
    tiers.store.put("a", chunk(10))
    assert tiers.store.flush(SECONDS)
    tiers.disk.error = None
    tiers.store.put("b", chunk(10))
    assert tiers.store.flush(SECONDS)
    assert set(tiers.disk.chunks) == {"b"}
    assert gauges(tiers.store)["disk_writes_dropped"] == 1


def test_a_chunk_is_written_once(tiers: Tiers) -> None:
    for _ in range(3):
        tiers.store.put("a", chunk(10))
        assert tiers.store.flush(SECONDS)
    assert tiers.disk.entered._value == 1


def test_removed_chunks_are_gone_from_every_tier(tiers: Tiers) -> None:
    """Chunks on their way are gone too: `b` waits behind `a`, which is being written."""
    tiers.disk.gate.clear()
    tiers.store.put("a", chunk(10))
    tiers.store.put("b", chunk(10))
    assert tiers.disk.entered.acquire(timeout=SECONDS)
    tiers.store.remove("b")
    threading.Timer(0.05, tiers.disk.gate.set).start()
    tiers.store.remove("a")
    assert tiers.store.flush(SECONDS)
    assert not tiers.disk.chunks and not tiers.remote.chunks and len(tiers.store) == 0
    assert tiers.store.get("a") is None and tiers.store.get("b") is None


def test_clearing_leaves_the_tiers_below(tiers: Tiers) -> None:
    tiers.store.put("a", chunk(10))
    assert tiers.store.flush(SECONDS)
    tiers.store.clear()
    assert len(tiers.store) == 0 and tiers.store.get_now("a") is None
    assert same(tiers.store.get("a"), chunk(10))


def test_closing_writes_what_waits(tiers: Tiers) -> None:
    tiers.disk.gate.clear()
    for key in "abc":
        tiers.store.put(key, chunk(10))
    threading.Timer(0.05, tiers.disk.gate.set).start()
    tiers.store.close(SECONDS)
    assert set(tiers.disk.chunks) == set("abc") and tiers.disk.closed and tiers.remote.closed
    tiers.store.put("d", chunk(10))
    assert tiers.store.get("d") is not None and tiers.store.get("a") is None


def test_closing_does_not_wait_for_ever(tiers: Tiers) -> None:
    tiers.disk.gate.clear()
    writer = tiers.store.below[0].writer
    for key in "abc":
        tiers.store.put(key, chunk(10))
    tiers.store.close(0.05)
    assert writer.num_dropped >= 2 and len(writer) == 0
    tiers.disk.gate.set()
    assert not writer.put("d", chunk(10))


class Observer:
    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.asked: list[ChunkLoad] = []
        self.seen: list[tuple[ChunkLoad, float]] = []

    def recompute(self, what: ChunkLoad) -> bool:
        self.asked.append(what)
        return self.answer

    def loaded(self, what: ChunkLoad, seconds: float) -> None:
        self.seen.append((what, seconds))


@pytest.mark.parametrize("recompute", [False, True])
def test_an_observer_is_asked_about_chunks_that_are_there(tiers: Tiers, recompute: bool) -> None:
    observer = tiers.store.observer = Observer(recompute)
    tiers.remote.chunks["a"] = chunk(10)
    model = ModelFingerprint("m", "r", "w", "float32", "{}", "t", num_layers=3, num_kv_heads=2, head_dim=2)
    content = ChunkId("a", "", tuple(range(10)))
    found = tiers.store.load("a", ExpectedChunk(model, content), may_recompute=True)
    assert (found is None) == recompute
    assert observer.asked == [ChunkLoad("remote", 960, 10)]
    assert [what for what, _ in observer.seen] == ([] if recompute else [ChunkLoad("remote", 960, 10)])
    assert tiers.store.load("absent", ExpectedChunk(model, replace(content, key="absent")), may_recompute=True) is None
    assert len(observer.asked) == 1


def test_without_a_choice_an_observer_only_watches(tiers: Tiers) -> None:
    observer = tiers.store.observer = Observer(True)
    tiers.disk.chunks["a"] = chunk(10)
    assert tiers.store.load("a") is not None
    assert not observer.asked and len(observer.seen) == 1 and observer.seen[0][1] > 0


class TestOverAnArena:
    """The memory tier is an arena, as with chunks in pinned memory: what is loaded lies in it at once."""

    def store(self, pages: int) -> tuple[TieredChunkStore, FakeStorage]:
        disk = FakeStorage()
        memory = PinnedChunkStore(Arena(np.zeros(pages * PAGE, np.uint8)), InFlight())
        return TieredChunkStore(memory, [tier("disk", disk)]), disk

    def test_chunks_are_read_to_where_they_stay(self) -> None:
        store, disk = self.store(2)
        for value, key in enumerate("abcd"):
            disk.chunks[key] = chunk(10, value)
        for value, key in enumerate("abcda"):
            kv = store.load(key)
            assert same(kv, chunk(10, value % 4))
            kept = store.get_now(key)
            assert kv is not None and store.memory.is_in_place(kv) and kept is not None and kept.k is kv.k
            assert (kv.loaded_from, kept.loaded_from) == ("disk", None)
            assert store.num_bytes <= store.budget_bytes
            del kv, kept
        assert len(store) == 2 and store.num_bytes == 2 * PAGE

    def test_where_requests_hold_everything_chunks_come_in_other_memory(self) -> None:
        store, disk = self.store(2)
        for value, key in enumerate("abc"):
            disk.chunks[key] = chunk(10, value)
        held = [store.load(key) for key in "abc"]
        assert all(same(kv, chunk(10, value)) for value, kv in enumerate(held))
        last = held[-1]
        assert last is not None and not store.memory.is_in_place(last)
        assert isinstance(store.memory, PinnedChunkStore)
        assert store.memory.num_unpinned == 1 and store.get_now("c") is None
        del held, last
        assert store.load("c") is not None and store.get_now("c") is not None

    def test_a_tier_that_reads_elsewhere_is_copied_from(self) -> None:
        store, disk = self.store(2)
        disk.chunks["a"] = chunk(10, 5)
        disk.get = lambda key, *_: disk.chunks[key]  # type: ignore[method-assign]
        kv = store.load("a")
        assert same(kv, chunk(10, 5)) and kv is not None and store.memory.is_in_place(kv)
        assert kv.k.data_ptr() != disk.chunks["a"].k.data_ptr()


def test_many_threads_may_use_it(tiers: Tiers) -> None:
    """Every answer is the chunk that was asked for, and memory's budget holds."""
    kvs = {f"{i}": chunk(5 + i % 4, i) for i in range(12)}
    tiers.remote.chunks.update(kvs)
    wrong: list[str] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed)
        for _ in range(200):
            key = str(order.integers(12))
            if order.random() < 0.2:
                tiers.store.put(key, kvs[key])
            elif not same(tiers.store.get(key), kvs[key]):
                wrong.append(key)
            if tiers.store.num_bytes > BUDGET:
                wrong.append("budget")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_over_a_real_disk(tmp_path: Path) -> None:
    """Budgets of both hold, and what the disk evicts is a miss."""
    config = DiskStoreConfig(tmp_path, 6 * PAGE, "0" * 32)
    disk = DiskChunkStore(config)
    below = Tier("disk", disk, 1 << 20)
    store = TieredChunkStore(MemoryChunkStore(BUDGET), [below])
    keys = [f"{i:032x}" for i in range(9)]
    for value, key in enumerate(keys):
        store.put(key, chunk(10, value))
        assert store.flush(SECONDS)
        assert disk.num_bytes <= config.budget_bytes and store.num_bytes <= BUDGET
    found = [store.get(key) for key in keys]
    assert all(kv is None or same(kv, chunk(10, value)) for value, kv in enumerate(found))
    assert sum(kv is not None for kv in found) >= 6
    assert gauges(store)["disk_chunks"] == 6 and gauges(store)["disk_bytes"] == 6 * PAGE
    store.close()


def test_what_a_disk_does_not_store_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error of writing, as often as it loses a chunk; what it does not take is a refusal. A chunk
    that is there already is neither."""
    store = TieredChunkStore(
        MemoryChunkStore(BUDGET), [Tier("disk", DiskChunkStore(DiskStoreConfig(tmp_path, 6 * PAGE, "0" * 32)), 1 << 20)]
    )

    def put(*values: int, size: int = 10) -> tuple[float, float]:
        for value in values:
            store.put(f"{value:032x}", chunk(size, value))
            assert store.flush(SECONDS)
        metrics = [Metric(f"vllm_blend:chunk_store_{name}", value) for name, value in store.gauges()]
        counted = {
            (family.name, sample.labels.get("operation")): sample.value
            for family in engine_families(metrics, "m")
            for sample in family.samples
            if sample.labels.get("tier") == "disk"
        }
        return counted["vllm_blend:chunk_store_errors", "write"], counted["vllm_blend:chunk_store_refused", None]

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    assert put(1, 1) == (0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        assert put(2) == (1, 0)
        assert put(3, 4) == (3, 0)  # while nothing is tried, either
    assert put(5, size=10_000)[1] == 1
    store.close()
