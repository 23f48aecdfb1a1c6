"""Whose chunks a store keeps, and how owners share its space.

Each owner has a part of a tier's budget: by its weight among those that have something there and have used the tier
lately, and never more than its own limit. Owners may take what others leave free. When space is needed, owners above
their part give it up first, so one that is not above its part loses nothing to others: only its own chunks make way for
more of its own.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Owner:
    """A tenant as stores know it. `max_bytes` is the most that it may hold in each tier; None: no limit."""

    name: str = ""
    weight: float = 1.0
    max_bytes: int | None = None

    @cached_property
    def id(self) -> str:
        """Return what stands for the owner outside of this process, where its name is nobody's business."""
        return hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest() if self.name else ""


ANYONE = Owner()


def parts(budget_bytes: int, owners: Mapping[str, Owner]) -> dict[str, float]:
    """Return the part of each of the owners that have one."""
    total = sum(owner.weight for owner in owners.values())
    return {
        name: min(budget_bytes * owner.weight / total, budget_bytes if owner.max_bytes is None else owner.max_bytes)
        for name, owner in owners.items()
    }


def above_their_parts(held: Mapping[str, int], parts: Mapping[str, float], asking: str, num_bytes: int) -> list[str]:
    """Return the owners that hold more than their part; the one that asks for more counts with that."""
    sizes = {**held, asking: held.get(asking, 0) + num_bytes}
    return [name for name, size in sizes.items() if size > parts.get(name, 0)]


class Place(NamedTuple):
    """Where a chunk stands among those of its owner: the least leaves first."""

    level: int
    priority: float
    last_use: int
    key: str


class LeastFirst:
    """The chunks of each owner, those first that leave first. Places that have become outdated may stay for a while."""

    def __init__(self, is_current: Callable[[Place], bool]) -> None:
        self._is_current = is_current
        self._heaps: dict[str, list[Place]] = {}
        self._limits: Counter[str] = Counter()  # the length at which a heap is cleared of outdated places

    def add(self, owner: str, place: Place) -> None:
        heap = self._heaps.setdefault(owner, [])
        heapq.heappush(heap, place)
        if len(heap) > max(64, self._limits[owner]):
            heap[:] = filter(self._is_current, heap)
            heapq.heapify(heap)
            self._limits[owner] = 4 * len(heap) + 64
            if not heap:
                self.forget(owner)

    def least(self, owner: str, is_pinned: Callable[[str], bool]) -> Place | None:
        """Return the place of the first chunk that is not pinned; None if there is none."""
        heap, pinned = self._heaps.get(owner, []), []
        while heap:
            if not self._is_current(heap[0]):
                heapq.heappop(heap)
            elif is_pinned(heap[0].key):
                pinned.append(heapq.heappop(heap))
            else:
                break
        found = heap[0] if heap else None
        for place in pinned:
            heapq.heappush(heap, place)
        return found

    def forget(self, owner: str) -> None:
        """Drop the places of an owner that has nothing any more."""
        self._heaps.pop(owner, None)
        self._limits.pop(owner, None)

    def clear(self) -> None:
        self._heaps.clear()
        self._limits.clear()
