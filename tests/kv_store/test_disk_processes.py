"""Several processes share a folder: none sees half a chunk, takes what another uses, or waits for ever."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clock import Clock
from tests.kv_store.disk_processes import (
    Child,
    check_after_a_crash,
    churn,
    hold_chunks,
    open_store,
    put_in_turns,
    stay_in_a_transaction,
    write_slowly,
)
from tests.kv_store.stored_chunks import PAGE, bytes_on_disk, chunk, hold, key, same, sized
from tests.waiting import DEADLINE, wait_until
from vllm_blend.kv_store import circuit_breaker


def test_two_processes_write_one_key(tmp_path: Path) -> None:
    name = key(1)
    versions = [chunk(name, tokens) for tokens in (50, 51, 90, 91)]
    with (
        open_store(tmp_path, 400) as store,
        Child(put_in_turns, tmp_path, name, 50, 80) as one,
        Child(put_in_turns, tmp_path, name, 90, 80) as other,
    ):
        wait_until(lambda: name in store)
        seen: set[int] = set()

        def look() -> int:
            found = store.get(name)
            matches = {at for at, version in enumerate(versions) if same(found, version)}
            assert len(matches) == 1, store.stats.misses  # always there, always whole
            seen.update(matches)
            assert store.num_bytes <= store.config.budget_bytes
            return len(seen)

        wait_until(lambda: look() > 2, every=0)
        for child in (one, other):
            child.connection.send("enough")
        while one.process.is_alive() or other.process.is_alive():
            look()
        assert one.receive() == other.receive() == set()
        assert store.stats.num_misses == 0
        assert len(store) == 1
    assert check_after_a_crash(tmp_path, 400, lambda _: versions) == 1


def test_processes_that_put_evict_and_read_side_by_side(tmp_path: Path) -> None:
    children = [Child(churn, tmp_path, 150, seed, 250) for seed in range(4)]
    try:
        outcomes = [child.receive() for child in children]
        assert not any(wrong for wrong, _ in outcomes)
        assert sum(hits for _, hits in outcomes) > 20
    finally:
        for child in children:
            child.kill()
    assert check_after_a_crash(tmp_path, 150, lambda name: [chunk(name)]) > 5


def test_a_chunk_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    with open_store(tmp_path, 8) as store, Child(write_slowly, tmp_path, key(0), 6) as child:
        assert child.receive() == "half"
        assert key(0) not in store and store.get(key(0)) is None and not hold(store, key(0))
        assert store.num_bytes == 6 * PAGE  # though it is counted
        store.put(key(1), sized(3))
        assert store.stats.refused == {"no_room": 1} and len(store) == 0
        child.connection.send("go on")
        assert child.receive() == "half"
        child.connection.send("go on")
        assert child.receive() == "done"
        assert same(store.get(key(0)), sized(6))


def test_the_space_of_a_killed_writer_is_used_by_others(tmp_path: Path) -> None:
    with open_store(tmp_path, 8) as store, Child(write_slowly, tmp_path, key(0), 6) as child:
        store.put(key(1), sized(2))
        assert child.receive() == "half"
        child.kill()
        store.put(key(2), sized(6))
        assert store.num_bytes == bytes_on_disk(tmp_path) == 8 * PAGE and store.space.num_evicted == 0
        assert same(store.get(key(1)), sized(2)) and same(store.get(key(2)), sized(6))
        assert store.get(key(0)) is None and store.stats.misses == {"absent": 1}


def test_holds_last_as_long_as_their_process(tmp_path: Path) -> None:
    with open_store(tmp_path, 8) as store:
        for number in range(4):
            store.put(key(number), sized(2), 10 + number)
        with Child(hold_chunks, tmp_path, [key(0), key(2), key(9)]) as child:
            assert child.receive() == [True, True, False]
            child.signal(signal.SIGSTOP)  # alive, if not well
            store.put(key(4), sized(2), 1)
            assert key(0) in store and key(1) not in store and key(2) in store
            store.put(key(5), sized(5), 1)
            assert key(5) not in store and store.stats.refused == {"no_room": 1}
            child.kill()
        store.put(key(5), sized(5), 1)
        assert key(5) in store and key(0) not in store


def test_a_process_that_hangs_in_a_transaction_costs_others_a_deadline_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch, circuit_breaker)
    with open_store(tmp_path, 8, timeout=0.3, retry_seconds=0.4) as store:
        store.config = replace(store.config, timeout=DEADLINE)  # of reads: they need no lock that others have
        store.put(key(0), sized(2))
        with Child(stay_in_a_transaction, tmp_path) as child:
            assert child.receive() == "inside"
            child.signal(signal.SIGSTOP)
            for _ in range(50):
                store.put(key(1), sized(2))
                assert same(store.get(key(0)), sized(2))  # readers do not wait at all
            assert store.stats.refused == {"failed": 1, "writes_off": 49}  # one deadline
            clock.advance(0.5)
            for _ in range(50):
                store.put(key(1), sized(2))
            assert store.stats.refused == {"failed": 2, "writes_off": 98}
            assert caplog.text.count("locked") == 1
            with pytest.raises(Exception, match="locked"):
                open_store(tmp_path, 8, timeout=0.2)
            child.signal(signal.SIGCONT)
            child.connection.send("go on")
            assert child.receive() == "outside"
            child.process.join(DEADLINE)
        clock.advance(0.5)
        store.put(key(1), sized(2))
        assert same(store.get(key(1)), sized(2))


def test_a_process_that_is_killed_in_a_transaction_is_no_obstacle(tmp_path: Path) -> None:
    with open_store(tmp_path, 8) as store, Child(stay_in_a_transaction, tmp_path) as child:
        assert child.receive() == "inside"
        child.kill()
        store.put(key(0), sized(2))
        assert same(store.get(key(0)), sized(2)) and not store.stats.refused
