"""Which of some chunks is worth least, as GreedyDual-Size-Frequency has it (Cherkasova, HP Labs 1998).

A chunk is worth its uses x what computing it again costs / its bytes. What the last one that left was worth is a clock
that is added when a chunk arrives or is used: without it, what was once popular would never leave.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass
from itertools import count


@dataclass
class _Entry:
    rate: float  # cost / bytes
    uses: int
    worth: float
    order: int  # of the last use


class Worth:
    """Keys and what they are worth. Of those that are worth the same, the one that was used longest ago is first."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._heap: list[tuple[float, int, str]] = []  # also of what is gone, or worth more by now
        self._order = count()
        self._clock = 0.0

    def add(self, key: str, rate: float) -> None:
        """A chunk is there, and used for the first time. `rate` is its cost by its bytes."""
        self._entries[key] = _Entry(rate, 0, 0.0, 0)
        self.use(key)

    def use(self, key: str) -> None:
        entry = self._entries[key]
        entry.uses += 1
        entry.worth, entry.order = self._clock + entry.uses * entry.rate, next(self._order)
        heapq.heappush(self._heap, (entry.worth, entry.order, key))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [(entry.worth, entry.order, key) for key, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, key: str) -> None:
        del self._entries[key]

    def clear(self) -> None:
        self._entries.clear()
        self._heap.clear()

    def pop_least(self, kept: Container[str]) -> str | None:
        """The key that is worth least and not `kept`, which leaves; None where there is none."""
        passed_over, found = [], None
        while self._heap and found is None:
            worth, order, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.order != order:
                continue
            if key in kept:
                passed_over.append((worth, order, key))
                continue
            found, self._clock = key, max(self._clock, worth)
            del self._entries[key]
        for item in passed_over:
            heapq.heappush(self._heap, item)
        return found
