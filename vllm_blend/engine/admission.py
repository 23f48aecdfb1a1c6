"""A queue that limits how many prompts gather their chunks at a time.

What is loaded for a prompt stays in memory until it runs, whatever the store evicts meanwhile.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from vllm_blend.core.turns import TurnQueue
from vllm_blend.engine.pieces import PendingBlend
from vllm_blend.request import Request, RequestStatus


class AdmissionQueue:
    """Admits prompts as long as the chunks of those that were admitted and do not run yet take at most `budget_bytes`;
    one prompt is always admitted. Tenants take turns, and so do the calls of a tenant; those of one call are admitted
    in the order in which they came."""

    def __init__(self, budget_bytes: int, bytes_per_token: int) -> None:
        self.budget_bytes, self.bytes_per_token = budget_bytes, bytes_per_token
        self._queue: TurnQueue[PendingBlend] = TurnQueue()  # by tenant and call
        self._admitted: deque[tuple[list[weakref.ref[Request]], int]] = deque()  # admitted, and their bytes
        self._held = 0

    def add(self, pending: PendingBlend) -> None:
        self._queue.add(_flow(pending), pending)

    def next(self) -> PendingBlend | None:
        """Admit the next prompt, and return it; None if it has to wait, or there is none."""
        while self._admitted and all(_runs(request()) for request in self._admitted[0][0]):
            self._held -= self._admitted.popleft()[1]
        flow = self._queue.next()
        if flow is None:
            return None
        num_bytes = self._queue.first(flow).num_tokens * self.bytes_per_token
        if self._admitted and self._held + num_bytes > self.budget_bytes:
            return None
        pending = self._queue.take(flow)
        self._queue.mark(flow)
        self._admitted.append(([weakref.ref(request) for request in pending.requests], num_bytes))
        self._held += num_bytes
        return pending

    def readmit(self, requests: Sequence[Request]) -> None:
        """Count requests no longer that hold nothing any more. They are added again, and must not wait for
        themselves."""
        again = [entry for entry in self._admitted if any(ref() in requests for ref in entry[0])]
        for entry in again:
            self._admitted.remove(entry)
            self._held -= entry[1]

    def forget(self, requests: Sequence[Request]) -> None:
        """Drop prompts of which all requests are gone."""
        gone = set(requests)
        self._queue.drop(lambda pending: gone.issuperset(pending.requests))


def _flow(pending: PendingBlend) -> tuple[str, str]:
    first = next(iter(pending.requests), None)
    return ("", "") if first is None else (first.tenant, first.call)


def _runs(request: Request | None) -> bool:
    """Return whether a request runs, has run or is gone: the scheduler sees to what it holds then."""
    return request is None or request.status is not RequestStatus.WAITING
