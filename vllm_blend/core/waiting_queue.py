"""The queue of requests that wait to run, and whether they fill a step."""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable
from itertools import islice

from vllm_blend.request import Request


class WaitingQueue(deque[Request]):
    """Requests sorted by priority, the next one at the left.

    `LLM.generate` asks after every prompt whether the queue `fills` a step, so each request is counted once: what was
    counted holds until `count_anew`, which any change but at the right end makes necessary.
    """

    def __init__(self, count_rows: Callable[[Request], int]) -> None:
        """Queue requests of which `count_rows` says how many tokens steps will compute."""
        super().__init__()
        self._count_rows = count_rows
        self.count_anew()

    def add(self, request: Request) -> None:
        """Queue a request behind all others of its priority."""
        insort_right(self, request, key=priority_of)
        if self[-1] is not request:
            self.count_anew()

    def add_first(self, request: Request) -> None:
        """Queue a request before all others of its priority."""
        insort_left(self, request, key=priority_of)
        self.count_anew()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        super().remove(request)
        self.count_anew()

    def fills(self, max_requests: int, max_tokens: int) -> bool:
        """Return whether so many requests, or requests of so many tokens, can run: they are not blocked. One that was
        blocked when it was counted counts after `count_anew`."""
        uncounted = islice(self, self._num_counted, None)
        while self._num_ready < max_requests and self._num_rows < max_tokens:
            request = next(uncounted, None)
            if request is None:
                return False
            self._num_counted += 1
            if not request.blocked:
                self._num_ready += 1
                self._num_rows += self._count_rows(request)
        return self._num_ready > 0

    def count_anew(self) -> None:
        """Forget what has been counted."""
        self._num_counted = self._num_ready = self._num_rows = 0


def priority_of(request: Request) -> int:
    return request.priority
