"""Counters of a store: the outcomes of requests, and how long its medium was used for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter


class StoreStats:
    """Counts of a store since it was opened, and its warnings, each of which is given once. Safe to use from several
    threads."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(__name__)
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.num_hits = 0
        self.num_stored = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.misses: Counter[str] = Counter()  # by reason; "absent" is the ordinary one
        self.refused: Counter[str] = Counter()  # chunks that were put and not stored, by reason

    @property
    def num_misses(self) -> int:
        return self.misses.total()

    def count_hit(self, num_bytes: int) -> None:
        with self._lock:
            self.num_hits += 1
            self.bytes_read += num_bytes

    def count_miss(self, reason: str) -> None:
        with self._lock:
            self.misses[reason] += 1

    def count_fault(self, kind: str, chunk: object, key: str, reason: object) -> None:
        """Count a chunk that is not what was asked for, with one warning for each `chunk`."""
        self.count_miss(kind)
        self.warn_once(str(chunk), "stored chunk %s not used, it will be computed again: %s", key, reason)

    def count_stored(self, num_bytes: int) -> None:
        with self._lock:
            self.num_stored += 1
            self.bytes_written += num_bytes

    def count_refused(self, reason: str, count: int = 1) -> None:
        if count:
            with self._lock:
                self.refused[reason] += count

    def warn_once(self, kind: str, message: str, *arguments: object) -> None:
        """Log a warning, unless there was one of this kind: further cases are only counted."""
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        self._logger.warning(message, *arguments)


class SharedTimer:
    """Divides time among the work that is under way: a second in which four reads run is a quarter of a second of each.

    So the seconds of a read say what it costs the medium, and not how many others it had to share it with; their sum is
    the time in which the medium was used. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_active = 0
        self._divided = 0.0  # the integral of 1 / num_active over time
        self._updated = 0.0

    def start(self) -> float:
        """Begin to time some work. What is returned is for `stop`."""
        return self._change_active(1)

    def stop(self, start: float) -> float:
        """End that work. Return its seconds."""
        return self._change_active(-1) - start

    def _change_active(self, by: int) -> float:
        with self._lock:
            now = time.perf_counter()
            if self._num_active:
                self._divided += (now - self._updated) / self._num_active
            self._num_active += by
            self._updated = now
            return self._divided
