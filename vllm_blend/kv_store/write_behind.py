"""Chunks on their way down to a slower tier, in a thread of their own.

No thread waits for a write: a chunk that arrives while too much is under way is not stored below, and counted. What
waits is written together, as a disk takes little longer for many small chunks than for one.
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
    """Writes the oldest chunks first. What is under way when the interpreter exits is still written."""

    def __init__(
        self, name: str, write: Callable[[Chunks], object], max_bytes: int, max_bytes_at_once: int = 0
    ) -> None:
        """`write` takes one chunk, or several of up to `max_bytes_at_once`. At most `max_bytes` wait, but always one
        chunk: larger ones could never be written."""
        self.name, self.max_bytes, self.max_bytes_at_once = name, max_bytes, max_bytes_at_once
        self.num_dropped = 0  # chunks that found the queue full
        self.num_failed = 0
        self._write = write
        self._executor = ThreadPoolExecutor(1, f"chunk-write-{name}")  # the interpreter lets it finish its work
        self._waiting: dict[str, ChunkKV] = {}
        self._num_bytes = 0
        self._writing: set[str] = set()  # keys
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, key: str) -> ChunkKV | None:
        """Return a chunk that is still to be written."""
        with self._changed:
            return self._waiting.get(key)

    def put(self, key: str, chunk: ChunkKV) -> bool:
        """Queue a chunk to be written. Return False if that cannot be. Never waits."""
        with self._changed:
            if key in self._waiting:
                return True
            full = bool(self._waiting) and self._num_bytes + chunk.nbytes > self.max_bytes
            if not full and not self._closed and self._submit():
                self._waiting[key] = chunk
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

    def discard(self, key: str) -> None:
        """Do not write a chunk. If it is being written, wait until it is, for half a minute at most."""
        with self._changed:
            self._forget(key, self._waiting.get(key))
            self._changed.wait_for(lambda: key not in self._writing, 30.0)

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written. Return whether that took less than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)

    def close(self, timeout: float) -> None:
        """Write what waits, for at most `timeout` seconds; what is left then is not stored."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closed = True
        done = self.flush(timeout)
        with self._changed:
            if not done:
                logger.warning("%d chunks were not stored on the %s tier in %g s", len(self), self.name, timeout)
                self.num_dropped += len(self._waiting)
                self._waiting.clear()
                self._num_bytes = 0
            self._changed.wait_for(lambda: not self._writing, max(0.0, deadline - time.monotonic()))
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self) -> bool:
        try:
            self._executor.submit(self._run)
        except RuntimeError:  # the interpreter is shutting down
            return False
        return True

    def _run(self) -> None:
        """Write what has waited longest. There is one call for every chunk; an earlier call may have written it."""
        with self._changed:
            chunks = self._oldest()
            self._writing = {key for key, _ in chunks}
        try:
            if chunks and not self._try_to_write(chunks, alone=len(chunks) == 1):
                for one in chunks:
                    self._try_to_write([one], alone=True)
        finally:
            with self._changed:
                self._writing = set()
                for key, chunk in chunks:
                    self._forget(key, chunk)
                self._changed.notify_all()

    def _oldest(self) -> list[tuple[str, ChunkKV]]:
        """Return as many chunks as are written at once, one at least where any waits."""
        chunks: list[tuple[str, ChunkKV]] = []
        num_bytes = 0
        for key, chunk in self._waiting.items():
            if chunks and num_bytes + chunk.nbytes > self.max_bytes_at_once:
                break
            chunks.append((key, chunk))
            num_bytes += chunk.nbytes
        return chunks

    def _forget(self, key: str, chunk: ChunkKV | None) -> None:
        """Take a chunk off the queue, unless another one has taken its place."""
        if chunk is not None and self._waiting.get(key) is chunk:
            del self._waiting[key]
            self._num_bytes -= chunk.nbytes

    def _try_to_write(self, chunks: Chunks, alone: bool) -> bool:
        """Write chunks. Return False if that fails and they are to be written one by one."""
        try:
            for _, chunk in chunks:
                chunk.wait()
            self._write(chunks)
        except Exception as error:  # of any kind: a thread that ends would stop all writing without a word
            if not alone:
                return False
            self.num_failed += 1
            level = logging.WARNING if self.num_failed == 1 else logging.DEBUG
            logger.log(level, "chunk %s was not stored on the %s tier: %s", chunks[0][0], self.name, error)
        return True
