"""What became of the requests to a store."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """Counts of a store since it was opened. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_hits = 0
        self.num_stored = 0
        self.num_evicted = 0
        self.bytes_read = 0
        self.bytes_written = 0
        self.misses: Counter[str] = Counter()  # by reason; "absent" is the ordinary one
        self.refused: Counter[str] = Counter()  # chunks that were put and not stored, by reason

    @property
    def num_misses(self) -> int:
        return self.misses.total()

    def hit(self, num_bytes: int) -> None:
        with self._lock:
            self.num_hits += 1
            self.bytes_read += num_bytes

    def miss(self, reason: str) -> None:
        with self._lock:
            self.misses[reason] += 1

    def stored(self, num_bytes: int) -> None:
        with self._lock:
            self.num_stored += 1
            self.bytes_written += num_bytes

    def refuse(self, reason: str) -> None:
        with self._lock:
            self.refused[reason] += 1

    def evicted(self, count: int) -> None:
        with self._lock:
            self.num_evicted += count
