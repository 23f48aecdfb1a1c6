"""The queue of requests that wait to run, in turn over tenants and their calls, and whether they fill a step.

Requests of a tenant, and of a call of it, take turns by the tokens that steps have computed for them (Sheng et al.,
"Fairness in Serving Large Language Models", 2024): of those of one priority, the tenant that got least for its weight
is next, and of its calls the one that got least. One that comes, or comes back, starts at the least of those that are
there: it does not save up turns. Where there is one call, requests keep their order.
"""

from __future__ import annotations

import heapq
from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from vllm_blend.request import Request


@dataclass(eq=False, slots=True)
class Call:
    """Requests that were sent together, in order of priority and arrival. `served`: tokens computed for them."""

    served: int
    waiting: deque[Request] = field(default_factory=deque)
    num_running: int = 0


@dataclass(eq=False, slots=True)
class Tenant:
    """The calls of a tenant that have requests, in the order in which they came. `served`: tokens computed for it, by
    its weight."""

    served: float
    calls: dict[str, Call] = field(default_factory=dict)
    num_running: int = 0
    weight: float = 1.0


class WaitingQueue:
    """Requests that wait, and for each tenant and call how many run and what they got.

    `LLM.generate` asks after every prompt whether the queue `fills` a step, so each request is counted once: what was
    counted holds until `count_anew`, which any change but at the end makes necessary.
    """

    def __init__(self, count_rows: Callable[[Request], int]) -> None:
        """Queue requests of which `count_rows` says how many tokens steps will compute."""
        self.tenants: dict[str, Tenant] = {}
        self.num_shared = 0  # calls of which several requests run
        self._accounts: dict[Request, tuple[Tenant, Call]] = {}  # of the requests that run
        self._count_rows = count_rows
        self._len = 0
        self._served_before = 0.0  # the most that any tenant had got that is not there any more
        self.count_anew()

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Request]:
        calls = (call for tenant in self.tenants.values() for call in tenant.calls.values())
        return chain.from_iterable(call.waiting for call in calls)

    def __contains__(self, request: Request) -> bool:
        tenant = self.tenants.get(request.tenant)
        call = None if tenant is None else tenant.calls.get(request.call)
        return call is not None and request in call.waiting

    @property
    def is_contended(self) -> bool:
        """Return whether several calls have requests that wait or run."""
        return len(self.tenants) > 1 or any(len(tenant.calls) > 1 for tenant in self.tenants.values())

    def flow_of(self, request: Request) -> str:
        """Return what a request shares its part of a step with: its tenant, or its call where there is one tenant."""
        return request.tenant if len(self.tenants) > 1 else request.call

    def add(self, request: Request) -> None:
        """Queue a request behind all others of its call and priority."""
        tenant, call = self._enter(request)
        insort_right(call.waiting, request, key=priority_of)
        self._len += 1
        is_last = tenant is next(reversed(self.tenants.values())) and call is next(reversed(tenant.calls.values()))
        if call.waiting[-1] is not request or not is_last:
            self.count_anew()

    def add_first(self, request: Request) -> None:
        """Queue a request before all others of its call and priority."""
        insort_left(self._enter(request)[1].waiting, request, key=priority_of)
        self._len += 1
        self.count_anew()

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        self.tenants[request.tenant].calls[request.call].waiting.remove(request)
        self._len -= 1
        self._leave(request)
        self.count_anew()

    def in_turn(self) -> Round:
        """Return what gives the requests in turn."""
        return Round(self)

    def take(self, call: Call) -> Request:
        """Take the first request of a call out. It must be put back, or have `started`, before anything else."""
        self._len -= 1
        return call.waiting.popleft()

    def put_back(self, requests: Iterable[Request]) -> None:
        """Put requests back that were taken, in the order in which they were."""
        for request in reversed(list(requests)):
            self.tenants[request.tenant].calls[request.call].waiting.appendleft(request)
            self._len += 1

    def started(self, request: Request) -> None:
        """Note that a request which was taken runs."""
        tenant = self.tenants[request.tenant]
        call = tenant.calls[request.call]
        self._accounts[request] = tenant, call
        tenant.num_running += 1
        call.num_running += 1
        self.num_shared += call.num_running == 2

    def stopped(self, request: Request) -> None:
        """Note that a request runs no more. One that is to wait again must have been added before."""
        tenant, call = self._accounts.pop(request)
        tenant.num_running -= 1
        call.num_running -= 1
        self.num_shared -= call.num_running == 1
        self._leave(request)

    def charge(self, request: Request, num_rows: int) -> None:
        """Count tokens that a step computes for a request which runs."""
        tenant, call = self._accounts[request]
        tenant.served += num_rows / tenant.weight
        call.served += num_rows

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

    def _enter(self, request: Request) -> tuple[Tenant, Call]:
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            least = min((each.served for each in self.tenants.values()), default=self._served_before)
            tenant = self.tenants[request.tenant] = Tenant(least)
        tenant.weight = request.weight
        call = tenant.calls.get(request.call)
        if call is None:
            call = tenant.calls[request.call] = Call(min((each.served for each in tenant.calls.values()), default=0))
        return tenant, call

    def _leave(self, request: Request) -> None:
        """Forget a call, and a tenant, that has no requests any more."""
        tenant = self.tenants[request.tenant]
        call = tenant.calls[request.call]
        if call.waiting or call.num_running:
            return
        del tenant.calls[request.call]
        if not tenant.calls:
            del self.tenants[request.tenant]
            self._served_before = max(self._served_before, tenant.served)


class Round:
    """The requests of a queue in turn, as far as they are asked for. Those that are taken change whose turn is next."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._heaps: list[tuple[Tenant, list[tuple[int, int, int, Call]]]] = []
        for tenant in queue.tenants.values():
            calls = [
                (call.waiting[0].priority, call.served, number, call)
                for number, call in enumerate(tenant.calls.values())
                if call.waiting
            ]
            if calls:
                heapq.heapify(calls)
                self._heaps.append((tenant, calls))

    def peek(self) -> Call | None:
        """Return the call whose first request is next; None if nothing waits."""
        while self._heaps:
            entry = min(self._heaps, key=_turn) if len(self._heaps) > 1 else self._heaps[0]
            calls = entry[1]
            priority, served, number, call = calls[0]
            if not call.waiting:
                heapq.heappop(calls)
                if not calls:
                    self._heaps.remove(entry)
            elif (call.waiting[0].priority, call.served) != (priority, served):  # it has got something since
                heapq.heapreplace(calls, (call.waiting[0].priority, call.served, number, call))
            else:
                return call
        return None

    def take(self) -> Request | None:
        """Take the next request out of the queue, as `WaitingQueue.take` does; None if nothing waits."""
        call = self.peek()
        return None if call is None else self._queue.take(call)


def _turn(entry: tuple[Tenant, list[tuple[int, int, int, Call]]]) -> tuple[int, float]:
    tenant, calls = entry
    return calls[0][0], tenant.served


def priority_of(request: Request) -> int:
    return request.priority
