"""Items that wait in queues of their flows, such as tenants, which take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")
Flow = tuple[str, ...]


class _Flows(Generic[T]):
    """The flows of one first name, in the order of their turns: those that have had none, and those that have had
    some."""

    def __init__(self) -> None:
        self.new: dict[Flow, deque[T]] = {}
        self.served: dict[Flow, deque[T]] = {}

    def __iter__(self) -> Iterator[Flow]:
        return chain(self.new, self.served)

    def __contains__(self, flow: Flow) -> bool:
        return flow in self.new or flow in self.served

    def __getitem__(self, flow: Flow) -> deque[T]:
        return self.new[flow] if flow in self.new else self.served[flow]

    def remove(self, flow: Flow) -> deque[T]:
        return self.new.pop(flow) if flow in self.new else self.served.pop(flow)


class TurnQueue(Generic[T]):
    """Items by flow, first in, first out in each. Of the flows that have items, the one whose last turn was longest ago
    is next. A flow of two names, such as a tenant and a call of it, is chosen by the first name, then by the second.
    What an operation takes grows with the number of first names that have items, not with that of flows."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Flows[T]] = {}  # by first name
        self._last: dict[str, int] = {}  # the number of the last turn of each first name
        self._num_turns = 0

    def count(self, flow: Flow) -> int:
        """Return how many items of a flow wait."""
        flows = self._waiting.get(flow[0], ())
        return len(flows[flow]) if isinstance(flows, _Flows) and flow in flows else 0

    def add(self, flow: Flow, item: T) -> None:
        flows = self._waiting.setdefault(flow[0], _Flows())
        (flows[flow] if flow in flows else flows.new.setdefault(flow, deque())).append(item)

    def next(self, without: Container[Flow] = ()) -> Flow | None:
        """Return the flow that is next, `without` some; None if no item waits."""
        names = self._waiting if len(self._waiting) < 2 else sorted(self._waiting, key=self._turn_of)
        found = (flow for name in names for flow in self._waiting[name] if flow not in without)
        return next(found, None)

    def first(self, flow: Flow) -> T:
        """Return the first item of a flow that has some."""
        return self._waiting[flow[0]][flow][0]

    def take(self, flow: Flow) -> T:
        """Take the first item of a flow out. It is a turn only with `mark`."""
        flows = self._waiting[flow[0]]
        item = flows[flow].popleft()
        if not flows[flow]:
            self._remove(flow)
        return item

    def mark(self, flow: Flow) -> None:
        """Note that a flow has its turn. Calls that have nothing else to wait for are forgotten, tenants are not."""
        self._num_turns += 1
        self._last[flow[0]] = self._num_turns
        flows = self._waiting.get(flow[0])
        if flows is not None and flow in flows:
            flows.served[flow] = flows.remove(flow)  # at the end

    def drop(self, is_unwanted: Callable[[T], bool]) -> None:
        """Remove items, wherever they wait."""
        for flow in [flow for flows in self._waiting.values() for flow in flows]:
            queue = self._waiting[flow[0]][flow]
            kept = [item for item in queue if not is_unwanted(item)]
            if len(kept) < len(queue):
                queue.clear()
                queue.extend(kept)
            if not queue:
                self._remove(flow)

    def _remove(self, flow: Flow) -> None:
        flows = self._waiting[flow[0]]
        flows.remove(flow)
        if not (flows.new or flows.served):
            del self._waiting[flow[0]]

    def _turn_of(self, name: str) -> int:
        return self._last.get(name, 0)
