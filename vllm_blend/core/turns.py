"""Items that wait in queues of their flows, such as tenants, which take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import Generic, TypeVar

T = TypeVar("T")
Flow = tuple[str, ...]


class TurnQueue(Generic[T]):
    """Items by flow, first in, first out in each. Of the flows that have items, the one whose last turn was longest ago
    is next. A flow of several names, such as a tenant and a call of it, is chosen by the first name, then by the next
    one."""

    def __init__(self) -> None:
        self._waiting: dict[Flow, deque[T]] = {}
        self._last: dict[Flow, int] = {}  # the number of the last turn of each flow, and of what its first names say
        self._num_turns = 0

    def count(self, flow: Flow) -> int:
        """Return how many items of a flow wait."""
        return len(self._waiting.get(flow, ()))

    def add(self, flow: Flow, item: T) -> None:
        self._waiting.setdefault(flow, deque()).append(item)

    def next(self, without: Container[Flow] = ()) -> Flow | None:
        """Return the flow that is next, `without` some; None if no item waits."""
        flows = [flow for flow in self._waiting if flow not in without]
        return min(flows, key=self._turns_of, default=None)

    def first(self, flow: Flow) -> T:
        """Return the first item of a flow that has some."""
        return self._waiting[flow][0]

    def take(self, flow: Flow) -> T:
        """Take the first item of a flow out. It is a turn only with `mark`."""
        item = self._waiting[flow].popleft()
        if not self._waiting[flow]:
            del self._waiting[flow]
        return item

    def mark(self, flow: Flow) -> None:
        """Note that a flow has its turn. Calls that have nothing else to wait for are forgotten, tenants are not."""
        self._num_turns += 1
        for stop in range(1, len(flow) + 1):
            self._last[flow[:stop]] = self._num_turns
        self._forget(flow)

    def drop(self, is_unwanted: Callable[[T], bool]) -> None:
        """Remove items, wherever they wait."""
        for flow, queue in list(self._waiting.items()):
            kept = deque(item for item in queue if not is_unwanted(item))
            self._waiting[flow] = kept
            if not kept:
                del self._waiting[flow]
                self._forget(flow)

    def _turns_of(self, flow: Flow) -> list[int]:
        return [self._last.get(flow[:stop], 0) for stop in range(1, len(flow) + 1)]

    def _forget(self, flow: Flow) -> None:
        if len(flow) > 1 and flow not in self._waiting:
            self._last.pop(flow, None)
