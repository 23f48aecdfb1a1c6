"""Chunks of waiting requests, loaded by a few threads while the engine computes for others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from vllm_blend.kv_store.chunk_kv import ChunkKV

logger = logging.getLogger(__name__)

NUM_THREADS = 4
LOAD_SECONDS = 10.0  # after which a chunk is computed again instead


@dataclass(frozen=True)
class _Load:
    future: Future[None]
    deadline: float  # time.monotonic


class ChunkLoader:
    """Loads chunks in other threads. `request` and `poll` never wait; they and `cancel` are for the engine's own
    thread.

    A load that is late counts as a miss. It goes on by itself, and its key cannot be asked for again meanwhile: a
    medium that hangs costs each chunk one deadline. A load that was cancelled too late goes on as well, and
    serves the next request for its key.
    """

    def __init__(self, timeout: float = LOAD_SECONDS, num_threads: int = NUM_THREADS) -> None:
        self.timeout = timeout
        self.num_late = 0
        self._executor = ThreadPoolExecutor(num_threads, "chunk-load")
        self._loads: dict[str, _Load] = {}
        self._late: dict[str, Future[None]] = {}  # that run on
        self._unwanted: dict[str, Future[None]] = {}  # that were cancelled, and run on
        self._changed = threading.Condition()
        self._arrived: list[tuple[str, ChunkKV | None]] = []
        self._woken = False

    def __len__(self) -> int:
        """Return the number of loads that are waited for."""
        return len(self._loads)

    def request(self, key: str, load: Callable[[], ChunkKV | None]) -> bool:
        """Begin to load a chunk. Return False if it cannot be had."""
        if key in self._loads:
            return True
        if key in self._late and not self._late[key].done():
            return False
        future = self._unwanted.pop(key, None)
        try:
            future = future or self._executor.submit(self._run, key, load)
        except RuntimeError:  # closed, or the interpreter is shutting down
            return False
        self._loads[key] = _Load(future, time.monotonic() + self.timeout)
        return True

    def cancel(self, key: str) -> None:
        """Stop waiting for a chunk."""
        self._drop(key, self._unwanted)

    def poll(self) -> list[tuple[str, ChunkKV | None]]:
        """Return what has arrived since the last call: each chunk, or None if there is none, or none in time."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
        results = []
        for key, chunk in arrived:
            if self._loads.pop(key, None) is not None:
                results.append((key, chunk))
            else:
                self._late.pop(key, None)
                self._unwanted.pop(key, None)
        now = time.monotonic()
        for key in [key for key, load in self._loads.items() if load.deadline <= now]:
            self._drop(key, self._late)
            self.num_late += 1
            if self.num_late == 1:
                message = "chunk %s did not arrive in %g s and is computed again: further cases are only counted"
                logger.warning(message, key, self.timeout)
            results.append((key, None))
        return results

    def wait(self, timeout: float) -> None:
        """Return when `poll` has something to return, when `wake` is called, or after `timeout` seconds."""
        if not self._loads:
            return
        earliest = min(load.deadline for load in self._loads.values())
        with self._changed:
            left = max(0.0, min(timeout, earliest - time.monotonic()))
            self._changed.wait_for(lambda: self._arrived or self._woken, left)
            self._woken = False

    def wake(self) -> None:
        """End the current `wait`, or the next one; for any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def deadline(self, key: str) -> float:
        """Return when a chunk that is waited for counts as late (time.monotonic)."""
        return self._loads[key].deadline

    def close(self) -> None:
        """Begin no further loads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _drop(self, key: str, running: dict[str, Future[None]]) -> None:
        """Stop waiting for a load. If it has begun, it is one of `running` from now on."""
        load = self._loads.pop(key, None)
        if load is not None and not load.future.cancel():
            running[key] = load.future

    def _run(self, key: str, load: Callable[[], ChunkKV | None]) -> None:
        chunk = None
        try:
            chunk = load()
        except Exception:  # of any kind: the engine must hear of it
            logger.warning("chunk %s could not be loaded and will be computed again", key, exc_info=True)
        with self._changed:
            self._arrived.append((key, chunk))
            self._changed.notify_all()
