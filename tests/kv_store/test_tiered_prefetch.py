"""Loads in other threads: no caller waits for longer than the deadline, and what comes later does no harm."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.clock import Clock
from tests.kv_store.tiers import SECONDS, chunk
from vllm_blend.kv_store import prefetch
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.prefetch import ChunkLoader
from vllm_blend.kv_store.stats import SharedTimer

KV = chunk(3)


class Gate:
    """A load that waits to be let through."""

    def __init__(self) -> None:
        self.opened, self._entered = threading.Event(), threading.Semaphore(0)

    def __call__(self) -> ChunkKV:
        self._entered.release()
        assert self.opened.wait(10 * SECONDS)
        return KV

    def wait_entered(self) -> None:
        """Wait until a thread has come here that was not waited for before."""
        assert self._entered.acquire(timeout=SECONDS)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that decides which loads are late."""
    return Clock(monkeypatch, prefetch)


def until(loader: ChunkLoader, count: int = 1) -> list[tuple[str, ChunkKV | None]]:
    results: list[tuple[str, ChunkKV | None]] = []
    deadline = time.monotonic() + SECONDS
    while len(results) < count:
        assert time.monotonic() < deadline
        loader.wait(SECONDS)
        results += loader.poll()
    return results


def failing() -> ChunkKV | None:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(("load", "expected"), [(lambda: KV, KV), (lambda: None, None), (failing, None)])
def test_what_became_of_a_load(load: Callable[[], ChunkKV | None], expected: ChunkKV | None) -> None:
    loader = ChunkLoader(timeout=SECONDS)
    assert loader.request("a", load) and len(loader) == 1
    assert until(loader) == [("a", expected)]
    assert len(loader) == 0 and loader.poll() == [] and loader.num_late == 0


def test_polling_does_not_wait_and_waiting_ends_with_the_first_arrival(gate: Gate) -> None:
    loader = ChunkLoader(timeout=SECONDS)
    loader.request("slow", gate)
    gate.wait_entered()
    start = time.monotonic()
    assert loader.poll() == []
    loader.wait(0.05)
    assert time.monotonic() - start < SECONDS / 2
    loader.request("fast", lambda: KV)
    assert until(loader) == [("fast", KV)]
    gate.opened.set()
    assert until(loader) == [("slow", KV)]


def test_there_is_nothing_to_wait_for_without_a_load() -> None:
    start = time.monotonic()
    ChunkLoader(timeout=SECONDS).wait(SECONDS)
    assert time.monotonic() - start < SECONDS / 2


def test_a_late_chunk_is_a_miss_and_cannot_be_asked_for_while_it_hangs(
    gate: Gate, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ChunkLoader(timeout=0.05)
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b"):
            loader.request(key, gate)
            gate.wait_entered()
        clock.advance(0.04)
        assert loader.poll() == []
        clock.advance(0.02)
        assert sorted(until(loader, 2)) == [("a", None), ("b", None)]
    assert loader.num_late == 2 and len(caplog.records) == 1
    assert not loader.request("a", gate)
    gate.opened.set()
    deadline = time.monotonic() + SECONDS
    while not loader.request("a", lambda: KV):  # until its thread has ended
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert until(loader) == [("a", KV)], "late arrivals of the earlier requests are dropped"


def test_deadlines_hold_for_loads_that_no_thread_has_begun(gate: Gate, clock: Clock) -> None:
    loader = ChunkLoader(timeout=0.1, num_threads=1)
    loader.request("stuck", gate)
    gate.wait_entered()
    loader.request("behind", lambda: KV)
    clock.advance(0.1)
    assert sorted(until(loader, 2)) == [("behind", None), ("stuck", None)]
    assert loader.request("behind", lambda: KV), "it never began, so nothing of it hangs"
    gate.opened.set()
    assert until(loader) == [("behind", KV)]


def test_what_is_cancelled_is_not_reported(gate: Gate) -> None:
    loader = ChunkLoader(timeout=SECONDS, num_threads=1)
    loader.request("running", gate)
    loader.request("queued", failing)
    gate.wait_entered()
    loader.cancel("running")
    loader.cancel("queued")
    loader.cancel("unknown")
    assert len(loader) == 0
    gate.opened.set()
    loader.request("next", lambda: KV)
    assert until(loader) == [("next", KV)]


def test_what_was_cancelled_can_be_asked_for_again(gate: Gate) -> None:
    """It can even while the load runs, and after it has arrived unseen."""
    loader = ChunkLoader(timeout=SECONDS)
    loader.request("a", gate)
    gate.wait_entered()
    loader.cancel("a")
    assert loader.request("a", failing), "it is what runs already"
    gate.opened.set()
    assert until(loader) == [("a", KV)]
    loader.request("a", lambda: KV)
    loader.wait(SECONDS)
    loader.cancel("a")
    assert loader.poll() == []
    assert loader.request("a", lambda: KV) and until(loader) == [("a", KV)]


def test_a_closed_loader_has_nothing() -> None:
    loader = ChunkLoader(timeout=SECONDS)
    loader.close()
    assert not loader.request("a", lambda: KV) and len(loader) == 0


def test_time_is_divided_among_what_runs_at_once() -> None:
    """Ten loads that overlap take the medium as long as it was used, not ten times that."""
    timer, shares, barrier = SharedTimer(), [], threading.Barrier(10)
    start = time.perf_counter()

    def work() -> None:
        began = timer.start()
        barrier.wait(SECONDS)
        time.sleep(0.05)
        shares.append(timer.stop(began))

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert 0.05 <= sum(shares) <= time.perf_counter() - start
    alone = timer.start()
    time.sleep(0.02)
    assert timer.stop(alone) >= 0.02
