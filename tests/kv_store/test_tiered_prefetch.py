"""Loads in other threads: nobody waits for longer than the deadline, and what comes later harms nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.kv_store.tiers import SECONDS, chunk
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.meter import Meter
from vllm_blend.kv_store.prefetch import ChunkLoader

KV = chunk(3)


class Gate:
    """A load that waits to be let through."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()

    def __call__(self) -> ChunkKV:
        self.entered.set()
        assert self.opened.wait(SECONDS)
        return KV


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


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
    loader = ChunkLoader()
    assert loader.request("a", load) and len(loader) == 1
    assert until(loader) == [("a", expected)]
    assert len(loader) == 0 and loader.poll() == [] and loader.num_late == 0


def test_polling_does_not_wait_and_waiting_ends_with_the_first_arrival(gate: Gate) -> None:
    loader = ChunkLoader()
    loader.request("slow", gate)
    assert gate.entered.wait(SECONDS)
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
    ChunkLoader().wait(SECONDS)
    assert time.monotonic() - start < SECONDS / 2


def test_a_late_chunk_is_a_miss_and_cannot_be_asked_for_while_it_hangs(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ChunkLoader(timeout=0.05)
    with caplog.at_level(logging.WARNING):
        for key in ("a", "b"):
            loader.request(key, gate)
        assert sorted(until(loader, 2)) == [("a", None), ("b", None)]
    assert loader.num_late == 2 and len(caplog.records) == 1
    assert not loader.request("a", gate)
    gate.opened.set()
    deadline = time.monotonic() + SECONDS
    while not loader.request("a", lambda: KV):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert until(loader) == [("a", KV)], "the late arrivals of before are nobody's"


def test_deadlines_hold_for_loads_that_no_thread_has_begun(gate: Gate) -> None:
    loader = ChunkLoader(timeout=0.1, num_threads=1)
    loader.request("stuck", gate)
    loader.request("behind", lambda: KV)
    assert sorted(until(loader, 2)) == [("behind", None), ("stuck", None)]
    assert loader.request("behind", lambda: KV), "it never began, so nothing of it hangs"
    gate.opened.set()
    assert until(loader) == [("behind", KV)]


def test_what_is_cancelled_is_not_reported(gate: Gate) -> None:
    loader = ChunkLoader(num_threads=1)
    loader.request("running", gate)
    loader.request("queued", failing)
    assert gate.entered.wait(SECONDS)
    loader.cancel("running")
    loader.cancel("queued")
    loader.cancel("unknown")
    assert len(loader) == 0
    gate.opened.set()
    loader.request("next", lambda: KV)
    assert until(loader) == [("next", KV)]


def test_what_was_cancelled_can_be_asked_for_again(gate: Gate) -> None:
    """Also while it runs, and after it has arrived unseen."""
    loader = ChunkLoader()
    loader.request("a", gate)
    assert gate.entered.wait(SECONDS)
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
    loader = ChunkLoader()
    loader.close()
    assert not loader.request("a", lambda: KV) and len(loader) == 0


def test_time_is_divided_among_what_runs_at_once() -> None:
    """Ten loads that overlap take the medium as long as it was used, not ten times that."""
    meter, shares, barrier = Meter(), [], threading.Barrier(10)
    start = time.perf_counter()

    def work() -> None:
        with meter.measure() as share:
            barrier.wait(SECONDS)
            time.sleep(0.05)
        shares.append(share.seconds)

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert 0.05 <= sum(shares) <= time.perf_counter() - start
    with meter.measure() as alone:
        time.sleep(0.02)
    assert alone.seconds >= 0.02
