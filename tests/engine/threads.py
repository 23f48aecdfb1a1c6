"""Several threads at once, for tests."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_blend.engine.lock import FairLock

PATIENCE = 120.0
Job = Callable[[], Any]


@contextmanager
def quick_switches() -> Iterator[None]:
    """Have the interpreter change threads often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def at_once(*jobs: Job) -> list[Any]:
    """Run every job in a thread of its own: results, or the error with which one ended."""
    results: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(index: int) -> None:
        try:
            start.wait()
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error

    with quick_switches():
        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def wait_until_wanted(lock: FairLock) -> None:
    """Wait until another thread waits for a lock that the calling thread holds: it gets the lock next."""
    deadline = time.monotonic() + PATIENCE
    while not lock._queue.locked():
        assert time.monotonic() < deadline, "no other thread wants the lock"
        time.sleep(0)
