"""Chunks on their way down to a slower tier, in a thread of their own.

Nobody waits for a write: what arrives while too much is under way is not stored below, and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm_blend.kv_store.chunk_kv import ChunkKV

logger = logging.getLogger(__name__)


class WriteBehind:
    """One chunk after another, oldest first. What is under way when the interpreter exits is still written."""

    def __init__(self, name: str, write: Callable[[str, ChunkKV], object], max_bytes: int) -> None:
        """At most `max_bytes` wait, but always one chunk: larger ones could never be written."""
        self.name, self.max_bytes = name, max_bytes
        self.num_dropped = 0  # chunks that found the queue full
        self.num_failed = 0
        self._write = write
        self._executor = ThreadPoolExecutor(1, f"chunk-write-{name}")  # the interpreter lets it finish its work
        self._pending: dict[str, ChunkKV] = {}
        self._num_bytes = 0
        self._current: str | None = None  # the key that is being written
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, key: str) -> ChunkKV | None:
        """A chunk that is still to be written."""
        with self._changed:
            return self._pending.get(key)

    def put(self, key: str, chunk: ChunkKV) -> bool:
        """Have a chunk written some time; False where that cannot be. Never waits."""
        with self._changed:
            if key in self._pending:
                return True
            full = bool(self._pending) and self._num_bytes + chunk.nbytes > self.max_bytes
            if not full and not self._closed and self._submit(key):
                self._pending[key] = chunk
                self._num_bytes += chunk.nbytes
                return True
            self.num_dropped += 1
            first = self.num_dropped == 1
        if first:
            logger.warning(
                "a chunk was not stored on the %s tier, as %.1f MiB wait to be written there: further ones are counted",
                self.name,
                self._num_bytes / 2**20,
            )
        return False

    def discard(self, key: str, timeout: float = 30.0) -> None:
        """Do not write a chunk; one that is being written is waited for."""
        with self._changed:
            chunk = self._pending.get(key)
            if chunk is not None:
                self._num_bytes -= chunk.nbytes
                del self._pending[key]
            self._changed.wait_for(lambda: self._current != key, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; whether that took less than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and self._current is None, timeout)

    def close(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` seconds; what is left then is not stored."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closed = True
        done = self.flush(timeout)
        with self._changed:
            if not done:
                logger.warning("%d chunks were not stored on the %s tier in %g s", len(self), self.name, timeout)
                self.num_dropped += len(self._pending)
                self._pending.clear()
                self._num_bytes = 0
            self._changed.wait_for(lambda: self._current is None, max(0.0, deadline - time.monotonic()))
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, key: str) -> bool:
        try:
            self._executor.submit(self._run, key)
        except RuntimeError:  # the interpreter is shutting down
            return False
        return True

    def _run(self, key: str) -> None:
        with self._changed:
            chunk = self._pending.get(key)
            if chunk is None:
                return
            self._current = key
        try:
            chunk.wait()
            self._write(key, chunk)
        except Exception as error:  # of any kind: a thread that ends would stop all writing without a word
            self.num_failed += 1
            level = logging.WARNING if self.num_failed == 1 else logging.DEBUG
            logger.log(level, "chunk %s was not stored on the %s tier: %s", key, self.name, error)
        finally:
            with self._changed:
                self._current = None
                if self._pending.get(key) is chunk:
                    del self._pending[key]
                    self._num_bytes -= chunk.nbytes
                self._changed.notify_all()
