"""How long things take that happen at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Share:
    """What one piece of work took."""

    seconds = 0.0


class Meter:
    """Divides time among what is under way: a second in which four reads run is a quarter of a second of each.

    So the seconds of a read say what it costs the medium, and not how many others it had to share it with; their sum is
    the time in which the medium was used. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_active = 0
        self._divided = 0.0  # the integral of 1 / num_active over time
        self._updated = 0.0

    @contextmanager
    def measure(self) -> Iterator[Share]:
        """`seconds` of what is yielded are known when the block ends."""
        share = Share()
        start = self.start()
        try:
            yield share
        finally:
            share.seconds = self.stop(start)

    def start(self) -> float:
        """Some work begins; what is returned is for `stop`."""
        return self._change(1)

    def stop(self, start: float) -> float:
        """That work is done: its seconds."""
        return self._change(-1) - start

    def _change(self, by: int) -> float:
        with self._lock:
            now = time.perf_counter()
            if self._num_active:
                self._divided += (now - self._updated) / self._num_active
            self._num_active += by
            self._updated = now
            return self._divided
