"""The disk store: what it keeps, in what memory it arrives, what leaves first, and what it says about itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kv_store.stored_chunks import MODEL, PAGE, bytes_on_disk, chunk, hold, key, same, segments, sized, there
from tests.waiting import DEADLINE
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.host_memory import Arena, aligned_empty
from vllm_blend.kv_store.index_rows import Entry
from vllm_blend.kv_store.layout import ChunkLayout
from vllm_blend.kv_store.pending import READ_BYTES, plan_runs
from vllm_blend.kv_store.store_config import DiskStoreConfig


def open_store(folder: Path, budget: int = 64 << 20, **settings: Any) -> DiskChunkStore:
    """Open a store whose deadline no machine is too slow for, unless `settings` have another one."""
    return DiskChunkStore(DiskStoreConfig(folder, budget, MODEL, **({"timeout": DEADLINE} | settings)))


class Held:
    """Reads of a store that wait until they are let through."""

    def __init__(self, store: DiskChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.num_done = threading.Event(), 0
        read = store.space.files.read

        def held(*arguments: Any) -> None:
            assert self.go_on.wait(DEADLINE)
            self.num_done += 1
            read(*arguments)

        monkeypatch.setattr(store.space.files, "read", held)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskChunkStore]:
    with open_store(tmp_path) as store:
        yield store


def large(number: int, dtype: torch.dtype = torch.bfloat16) -> ChunkKV:
    """8 layers of 0.5 MiB: larger than what is read at once."""
    kv = torch.randn(2, 8, 256, 4, 128, generator=torch.manual_seed(number))
    return ChunkKV(*kv.to(dtype))


# What is kept.


def test_what_is_put_comes_back_also_in_another_process(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(20):
            kv = chunk(key(number))
            assert store.put(key(number), kv) is kv
        assert len(store) == 20 and key(3) in store and key(20) not in store
    with open_store(tmp_path) as store:
        assert len(store) == 20
        assert all(same(store.get(key(number)), chunk(key(number))) for number in range(20))
        assert store.get(key(20)) is None and store.get("no key at all") is None
        assert (store.stats.num_hits, store.stats.num_misses, store.stats.misses) == (20, 2, {"absent": 2})


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["auto", "fp8", "int8"])
def test_large_and_small_chunks_in_every_format(tmp_path: Path, how: str, dtype: torch.dtype, direct: bool) -> None:
    with open_store(tmp_path, format=how, direct=direct) as store:
        assert store.space.files.direct == direct, "this file system takes no O_DIRECT: use another folder (TMPDIR)"
        for number, kv in enumerate((large(0, dtype), chunk(key(5), dtype=dtype))):
            store.put(key(number), kv)
            found = store.get(key(number))
            assert found is not None and found.k.dtype == dtype
            if how == "auto":
                assert same(found, kv)
            else:
                for got, expected in ((found.k, kv.k), (found.v, kv.v)):
                    error = (got.float() - expected.float()).norm() / expected.float().norm()
                    assert error < {"int8": 0.01, "fp8": 0.03}[how]


def test_a_chunk_that_is_put_again_is_written_again_only_if_it_is_another(store: DiskChunkStore) -> None:
    store.put(key(0), sized(4))
    store.put(key(0), sized(4))
    assert store.stats.num_stored == 1 and store.stats.refused == {"present": 1}
    other = ChunkKV(sized(5).v, sized(5).k)
    store.put(key(0), other)
    assert same(store.get(key(0)), other)
    assert (len(store), store.num_bytes, store.stats.num_stored) == (1, 5 * PAGE, 2)


def test_removing_gives_the_space_back_to_the_file_system(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(4):
            store.put(key(number), sized(16))
        assert bytes_on_disk(tmp_path) == store.num_bytes == 64 * PAGE
        store.remove(key(1))
        store.remove(key(1))
        store.remove("nothing")
        assert bytes_on_disk(tmp_path) == store.num_bytes == 48 * PAGE
        assert key(1) not in store and store.get(key(1)) is None
        store.clear()
        assert (len(store), store.num_bytes, segments(tmp_path)) == (0, 0, [])
        store.put(key(1), sized(16))
        assert same(store.get(key(1)), sized(16))


def test_full_segments_are_followed_by_new_ones_and_go_when_they_are_empty(tmp_path: Path) -> None:
    with open_store(tmp_path, segment_bytes=8 * PAGE) as store:
        for number in range(12):
            store.put(key(number), sized(3))
        assert len(segments(tmp_path)) == 4  # three chunks fill a segment
        for number in (0, 1, 2, 4):
            store.remove(key(number))
        assert len(segments(tmp_path)) == 3
        assert all(same(store.get(key(number)), sized(3)) for number in (3, 5, 6, 7, 8, 9, 10, 11))


def test_a_chunk_is_on_the_disk_before_the_index_says_so(
    store: DiskChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    sync, publish = os.fdatasync, store.space.index.publish

    def synced(fd: int) -> None:
        sync(fd)
        events.append("synced")

    def published(entry: Entry) -> Entry | None:
        events.append("published")
        return publish(entry)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(store.space.index, "publish", published)
    store.put(key(0), sized(2))
    assert events == ["synced", "published"]


# Where it arrives.


def test_layers_arrive_one_by_one_in_memory_of_the_callers(tmp_path: Path) -> None:
    kv = large(1)
    arena = Arena(aligned_empty(16 << 20).numpy())
    with open_store(tmp_path) as store:
        store.put(key(0), kv)
        pending = there(store.read(key(0), arena.allocate))
        for layer in range(8):
            k, v = there(pending.layer(layer))
            assert torch.equal(k, kv.k[layer]) and torch.equal(v, kv.v[layer])
        found = there(pending.wait())
        assert arena.num_bytes_used == kv.nbytes  # read in place: no staging memory was taken
        assert found.on_host is not None and store._staging.num_bytes_used == 0
        assert store.stats.num_hits == 1
        del pending, found, k, v
        assert arena.num_bytes_used == 0


@pytest.mark.parametrize("how", ["auto", "int8"])
def test_memory_that_starts_anywhere_will_do(tmp_path: Path, how: str) -> None:
    memory = torch.empty(5 << 20, dtype=torch.uint8)
    with open_store(tmp_path, format=how) as store:
        store.put(key(0), large(2))
        found = there(store.get(key(0), lambda size: memory[16 : 16 + size]))
        assert found.k.data_ptr() == memory.data_ptr() + 16
        assert same(found, there(store.get(key(0))))


def test_no_memory_is_a_miss(store: DiskChunkStore) -> None:
    store.put(key(0), sized(1))
    assert store.read(key(0), lambda size: None) is None
    assert store.stats.misses == {"no_memory": 1}
    store.clear()
    assert store.num_bytes == 0  # the chunk is not held


def test_an_error_of_the_callers_allocator_reaches_the_caller(store: DiskChunkStore) -> None:
    def fail(num_bytes: int) -> torch.Tensor:
        raise MemoryError

    store.put(key(0), sized(1))
    with pytest.raises(MemoryError):
        store.get(key(0), fail)
    store.clear()
    assert store.num_bytes == 0


def test_the_first_layers_of_all_chunks_are_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, num_threads=1) as store:
        for number in range(3):
            store.put(key(number), large(number))
        read = store.space.files.read
        order: list[int] = []

        def noted(*arguments: Any) -> None:
            order.append(arguments[1])
            read(*arguments)

        monkeypatch.setattr(store.space.files, "read", noted)
        found = store.read_many([key(0), key(9), key(1), key(2)])
        assert found[1] is None
        assert all(same(there(found[at]).wait(), large(number)) for at, number in ((0, 0), (2, 1), (3, 2)))
        assert order == sorted(order) and order[:3] == [0, 0, 0]


@pytest.mark.parametrize("layer_bytes", [100, 20_000, 300_000, 700_000, 3_000_000])
def test_a_layer_is_read_at_once_and_small_ones_together(layer_bytes: int) -> None:
    layout = ChunkLayout(12, layer_bytes // 4, 1, 1, torch.bfloat16, "auto")
    runs = plan_runs(layout)
    assert runs[0][0] == 0 and runs[-1][1] == layout.payload_bytes
    assert all(a[1] == b[0] for a, b in pairwise(runs))
    assert all(stop - start < READ_BYTES + max(READ_BYTES, layer_bytes + 2 * PAGE) for start, stop in runs)
    if layer_bytes > READ_BYTES:
        assert runs == [(start, start + layout.stride) for start in range(0, layout.payload_bytes, layout.stride)]


# What leaves.


def evicted(store: DiskChunkStore, numbers: range) -> set[int]:
    return {number for number in numbers if key(number) not in store}


def test_the_chunk_of_least_cost_by_bytes_leaves_first(tmp_path: Path) -> None:
    with open_store(tmp_path, 10 * PAGE) as store:
        store.put(key(0), sized(2), cost=30)
        store.put(key(1), sized(4), cost=40)
        store.put(key(2), sized(4), cost=50)
        store.put(key(3), sized(2), cost=1000)  # 15, 10 and 12.5 a page: number 1 leaves
        assert evicted(store, range(4)) == {1} and store.space.num_evicted == 1
        store.put(key(4), sized(3), cost=1000)  # 2 pages are free
        assert evicted(store, range(5)) == {1, 2}
        assert store.num_bytes == bytes_on_disk(tmp_path) == 7 * PAGE


def test_use_counts_as_much_as_cost(tmp_path: Path) -> None:
    with open_store(tmp_path, 4 * PAGE) as store:
        for number in range(4):
            store.put(key(number), sized(1), cost=10)
        for number, uses in ((0, 2), (1, 1), (2, 3), (3, 2)):
            assert all(store.get(key(number)) for _ in range(uses))
        store.put(key(4), sized(2), cost=10)
        assert evicted(store, range(5)) == {1, 0}  # used 1 and 2 times; number 3 came later than number 0


def test_uses_by_another_store_count(tmp_path: Path) -> None:
    with open_store(tmp_path, 3 * PAGE) as one:
        for number in range(3):
            one.put(key(number), sized(1), cost=10)
        with open_store(tmp_path, 3 * PAGE) as other:
            assert other.get(key(0)) and other.get(key(1))
        one.put(key(3), sized(1), cost=10)
        assert evicted(one, range(4)) == {2}


def test_what_was_once_popular_leaves_in_the_end(tmp_path: Path) -> None:
    with open_store(tmp_path, 4 * PAGE) as store:
        store.put(key(0), sized(1), cost=1)
        assert all(store.get(key(0)) for _ in range(20))
        last = next(number for number in range(1, 200) if store.put(key(number), sized(1), 1) and key(0) not in store)
        assert 20 < last < 100


def test_a_use_counts_from_when_it_was(tmp_path: Path) -> None:
    """When many chunks have left, one that is used again still outlives one that is as new and is not."""
    with open_store(tmp_path, 2 * PAGE) as store:
        for number in range(10):
            store.put(key(number), sized(1), cost=1)
        assert store.get(key(8)) is not None
        store.put(key(10), sized(1), cost=1)
        assert key(8) in store and key(9) not in store


def test_long_chunks_are_worth_more_by_default(tmp_path: Path) -> None:
    """Computing them again takes longer for each of their bytes."""
    with open_store(tmp_path, 4 * PAGE) as store:
        store.put(key(0), sized(1))
        store.put(key(1), sized(3))
        store.put(key(2), sized(1))
        assert evicted(store, range(3)) == {0}


def test_a_chunk_above_the_budget_is_not_stored_and_nothing_leaves_for_it(tmp_path: Path) -> None:
    with open_store(tmp_path, 4 * PAGE) as store:
        store.put(key(0), sized(4))
        store.put(key(1), sized(5))
        assert len(store) == 1 and store.stats.refused == {"too_large": 1}


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path) -> None:
    with open_store(tmp_path, 8 * PAGE) as store:
        for number in range(8):
            store.put(key(number), sized(1), cost=10 + number)
    with open_store(tmp_path, 3 * PAGE) as store:
        assert evicted(store, range(8)) == set(range(5))
        assert store.num_bytes == bytes_on_disk(tmp_path) == 3 * PAGE


def test_held_chunks_stay(tmp_path: Path) -> None:
    with open_store(tmp_path, 4 * PAGE) as store:
        for number in range(4):
            store.put(key(number), sized(1), cost=10 + number)
        first, again = hold(store, key(0)), hold(store, key(0))
        assert first is not None and again is not None and hold(store, key(2)) and not hold(store, key(9))
        store.put(key(4), sized(2), cost=1)
        assert evicted(store, range(5)) == {1, 3}
        store.put(key(5), sized(3), cost=1)  # 2 pages are held
        assert key(5) not in store and key(4) in store and store.stats.refused == {"no_room": 1}
        store.space.release(first)
        store.put(key(6), sized(3), cost=1)
        assert key(6) not in store  # it was held twice
        store.space.release(again)
        store.put(key(6), sized(3), cost=1)
        assert evicted(store, range(7)) == {0, 1, 3, 4, 5}


def test_a_held_chunk_that_is_removed_keeps_its_space_until_it_is_released(tmp_path: Path) -> None:
    with open_store(tmp_path, 4 * PAGE) as store:
        store.put(key(0), sized(3))
        entry = hold(store, key(0))
        assert entry is not None
        store.remove(key(0))
        assert key(0) not in store and store.num_bytes == bytes_on_disk(tmp_path) == 3 * PAGE
        store.put(key(1), sized(2))
        assert key(1) not in store and store.stats.refused == {"no_room": 1}
        store.space.release(entry)
        store.put(key(1), sized(2))
        assert same(store.get(key(1)), sized(2)) and bytes_on_disk(tmp_path) == 2 * PAGE


def test_what_is_being_read_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, 4 * PAGE) as store:
        store.put(key(0), sized(3), cost=1)
        held = Held(store, monkeypatch)
        pending = there(store.read(key(0)))
        store.put(key(1), sized(3), cost=1000)
        assert key(1) not in store
        held.go_on.set()
        assert same(pending.wait(), sized(3))
        store.put(key(1), sized(3), cost=1000)
        assert key(1) in store and key(0) not in store


def test_admission_on_second_use(tmp_path: Path) -> None:
    with open_store(tmp_path, admit_on_second_use=True) as store:
        for number in range(3):
            store.put(key(number), sized(1))
        assert len(store) == 0 and store.stats.refused == {"first_use": 3}
    with open_store(tmp_path, admit_on_second_use=True) as store:
        store.put(key(1), sized(1))
        assert len(store) == 1 and same(store.get(key(1)), sized(1))


def test_space_comes_back_by_segments_where_there_are_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAT and NFS 3, imitated here, have no holes: the segment that is worth least for its bytes goes as a whole."""
    monkeypatch.setattr("vllm_blend.kv_store.segment._punch", refuse_to_punch)
    with open_store(tmp_path, 24 * PAGE, segment_bytes=8 * PAGE) as store:
        assert not store.space.files.can_punch
        for number in range(12):
            store.put(key(number), sized(2), cost=100 if 4 <= number < 8 else 200)
        assert len(segments(tmp_path)) == 3 and len(store) == 12
        store.put(key(12), sized(2), cost=50)
        assert evicted(store, range(13)) == {4, 5, 6, 7}
        store.remove(key(0))
        assert store.num_bytes == 18 * PAGE == bytes_on_disk(tmp_path)  # the dead chunk still takes its space
        for number in range(13, 16):
            store.put(key(number), sized(2), cost=50)
        assert hold(store, key(12))
        store.put(key(16), sized(2), cost=500)
        assert evicted(store, range(17)) == {0, 1, 2, 3, 4, 5, 6, 7}  # with number 12's segment held
        assert store.num_bytes == bytes_on_disk(tmp_path) == 18 * PAGE
        for number in (8, 9, 10, 11, 12, 13, 14, 15, 16):
            assert same(store.get(key(number)), sized(2))
        for number in (8, 9, 10, 11):
            store.remove(key(number))
        assert store.num_bytes == bytes_on_disk(tmp_path) == 10 * PAGE


def refuse_to_punch(*_: object) -> None:
    raise OSError(95, "Operation not supported")


# Deadlines and threads.


def test_a_layer_that_is_late_is_a_miss_and_no_reader_waits_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path) as store:
        store.put(key(0), large(3))
        held = Held(store, monkeypatch)
        store.config = replace(store.config, timeout=0.2)
        pending = there(store.read(key(0)))
        assert pending.layer(0, timeout=0.05) is None and pending.layer(1) is None and pending.wait() is None
        assert store.get(key(0)) is None  # by the store's own deadline
        assert held.num_done == 0, "a thread waited for the disk"
        assert (store.stats.num_hits, store.stats.misses) == (0, {"timeout": 2})
        held.go_on.set()
        monkeypatch.undo()
        store.config = replace(store.config, timeout=DEADLINE)
        assert same(store.get(key(0)), large(3)) and store.stats.num_hits == 1


def test_an_abandoned_chunk_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path, num_threads=1) as store:
        store.put(key(0), large(4))
        held = Held(store, monkeypatch)
        pending = there(store.read(key(0)))
        pending.abandon()
        held.go_on.set()
        assert pending.wait() is None and held.num_done <= 1
        assert store.stats.misses == {"abandoned": 1}
        store.clear()
        assert store.num_bytes == 0


def test_many_threads_put_get_and_evict(tmp_path: Path) -> None:
    failures: list[object] = []

    def work(store: DiskChunkStore, seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(60):
            name = key(int(random.zipf(1.3)) % 40)
            try:
                found = store.get(name)
                if found is None:
                    store.put(name, chunk(name))
                elif not same(found, chunk(name)):
                    failures.append(name)
                if store.num_bytes > store.config.budget_bytes:
                    failures.append("budget")
            except BaseException as error:
                failures.append(error)

    with open_store(tmp_path, 100 * PAGE, segment_bytes=50 * PAGE) as store:
        threads = [threading.Thread(target=work, args=(store, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert not failures and not any(thread.is_alive() for thread in threads)
        assert (
            store.stats.num_hits + store.stats.num_misses == 480
            and store.stats.num_hits > 50
            and store.space.num_evicted > 10
        )
        assert set(store.stats.misses) == {"absent"}
        assert bytes_on_disk(tmp_path) == store.num_bytes


# Bad input.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"budget_bytes": 0}, "budget_bytes=0 must be positive"),
        ({"segment_bytes": -1}, "segment_bytes=-1"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"staging_bytes": -1}, "staging_bytes=-1"),
        ({"format": "int4"}, "format='int4' must be one of auto, fp8, int8"),
        ({"model": "gpt"}, "model='gpt' must be a ModelFingerprint.digest"),
    ],
)
def test_settings_that_cannot_be_say_so(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    arguments: dict[str, Any] = {"folder": tmp_path, "budget_bytes": 1, "model": MODEL} | settings
    with pytest.raises(ValueError, match=reason):
        DiskStoreConfig(**arguments)


def test_what_cannot_be_put_says_so(store: DiskChunkStore) -> None:
    with pytest.raises(ValueError, match="chunk key 'x' must be 32 hex digits"):
        store.put("x", sized(1))
    for cost in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"cost=.* must be positive and finite"):
            store.put(key(0), sized(1), cost)
    with pytest.raises(ValueError, match="must have one dtype"):
        store.put(key(0), ChunkKV(torch.zeros(1, 1, 1, 1).double(), torch.zeros(1, 1, 1, 1).double()))
    assert len(store) == 0 and store.num_bytes == 0


def test_what_cannot_be_quantized_is_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = ChunkKV(torch.full((1, 2, 1, 2), float("nan")), torch.zeros(1, 2, 1, 2))
    with open_store(tmp_path, format="int8") as store:
        store.put(key(0), kv)
        store.put(key(1), kv)
        assert (len(store), store.num_bytes, store.stats.refused) == (0, 0, {"not_quantizable": 2})
        store.put(key(2), sized(1))
        assert len(store) == 1
    assert caplog.text.count("not finite") == 1


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_store(tmp_path / "file")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    store.close()
    for use in (lambda: store.get(key(0)), lambda: store.put(key(0), sized(1)), lambda: len(store)):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_store_is_of_no_use_after_a_fork_and_leaves_its_parent_alone(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.put(key(0), sized(1))
        assert hold(store, key(0))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                store.get(key(0))
            except RuntimeError as error:
                code = 0 if "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        with open_store(tmp_path, PAGE) as other:
            other.put(key(1), sized(1))
            assert key(1) not in other  # number 0 is still held
        assert same(store.get(key(0)), sized(1))
