"""Chunks on their way down to a slower tier, in a thread of their own.

Nobody waits for a write: what arrives while too much is under way is not stored below, and counted. What waits is
written together, as a disk takes little longer for many small chunks than for one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from vllm_blend.kv_store.chunk_kv import ChunkKV

logger = logging.getLogger(__name__)

Chunks = Sequence[tuple[str, ChunkKV]]


class WriteBehind:
    """Oldest chunks first. What is under way when the interpreter exits is still written."""

    def __init__(self, name: str, write: Callable[[Chunks], object], max_bytes: int, max_together: int = 0) -> None:
        """`write` takes one chunk, or several of up to `max_together` bytes. At most `max_bytes` wait, but always one
        chunk: larger ones could never be written."""
        self.name, self.max_bytes, self.max_together = name, max_bytes, max_together
        self.num_dropped = 0  # chunks that found the queue full
        self.num_failed = 0
        self._write = write
        self._executor = ThreadPoolExecutor(1, f"chunk-write-{name}")  # the interpreter lets it finish its work
        self._pending: dict[str, ChunkKV] = {}
        self._num_bytes = 0
        self._current: set[str] = set()  # keys that are being written
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
            if not full and not self._closed and self._submit():
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
            self._changed.wait_for(lambda: key not in self._current, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; whether that took less than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and not self._current, timeout)

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
            self._changed.wait_for(lambda: not self._current, max(0.0, deadline - time.monotonic()))
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self) -> bool:
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # the interpreter is shutting down
            return False
        return True

    def _run(self) -> None:
        """Write what has waited longest. One call for every chunk, of which an earlier one may have written it."""
        with self._changed:
            chunks = self._oldest()
            self._current = {key for key, _ in chunks}
        if not chunks:
            return
        try:
            for _, chunk in chunks:
                chunk.wait()
            self._write(chunks)
        except Exception as error:  # of any kind: a thread that ends would stop all writing without a word
            if len(chunks) == 1:
                self._failed(chunks[0][0], error)
            else:
                for one in chunks:
                    self._write_alone(*one)
        finally:
            with self._changed:
                self._current = set()
                for key, chunk in chunks:
                    if self._pending.get(key) is chunk:
                        del self._pending[key]
                        self._num_bytes -= chunk.nbytes
                self._changed.notify_all()

    def _oldest(self) -> list[tuple[str, ChunkKV]]:
        """As many as are written together, one at least."""
        chunks: list[tuple[str, ChunkKV]] = []
        size = 0
        for key, chunk in self._pending.items():
            if chunks and size + chunk.nbytes > self.max_together:
                break
            chunks.append((key, chunk))
            size += chunk.nbytes
        return chunks

    def _write_alone(self, key: str, chunk: ChunkKV) -> None:
        """One of several that could not be written together."""
        try:
            self._write([(key, chunk)])
        except Exception as error:  # as above
            self._failed(key, error)

    def _failed(self, key: str, error: Exception) -> None:
        self.num_failed += 1
        level = logging.WARNING if self.num_failed == 1 else logging.DEBUG
        logger.log(level, "chunk %s was not stored on the %s tier: %s", key, self.name, error)
