"""The requests whose preparation takes long, such as compiling a grammar: done in threads, in turn over tenants."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vllm_blend.core.turns import Flow, TurnQueue
from vllm_blend.engine.errors import QueueFullError
from vllm_blend.engine.process.messages import Add
from vllm_blend.sampling_params import SamplingParams

THREADS = 2  # so that one tenant's long preparation keeps no other tenant waiting
MAX_WAITING = 64  # requests of a tenant


class Preparation:
    """Prepares requests, one of a tenant at a time and the tenants in turn. Requests that have been prepared are in
    `done`, in the order in which they were. All methods are for one thread."""

    def __init__(self, prepare: Callable[[SamplingParams], None]) -> None:
        """`prepare` is called in other threads, several at a time. An error of it is raised again where the request is
        added."""
        self._prepare = prepare
        self.done: deque[Add] = deque()
        self._queue: TurnQueue[Add] = TurnQueue()  # by tenant
        self._busy: set[Flow] = set()
        self._known: set[int] = set()  # numbers of the requests that are wanted
        self._changing = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def __len__(self) -> int:
        """Return how many requests wait or are being prepared."""
        return len(self._known)

    def add(self, new: Add) -> None:
        """Queue a request. Raises QueueFullError if as many of its tenant wait as may."""
        with self._changing:
            if self._queue.count((new.owner.name,)) >= MAX_WAITING:
                raise QueueFullError(
                    f"{MAX_WAITING} requests wait for their structured outputs to be compiled, as many as may: try "
                    "again in a few seconds",
                    retry_after=5.0,
                )
            self._queue.add((new.owner.name,), new)
            self._known.add(new.number)
            self._begin()

    def drop(self, number: int) -> None:
        """Forget a request. What is being prepared for it is prepared to the end."""
        with self._changing:
            if number not in self._known:
                return
            self._known.discard(number)
            self._queue.drop(lambda new: new.number == number)

    def take_done(self) -> list[Add]:
        """Return the requests that have been prepared since the last call, but for those that were dropped."""
        taken = []
        while self.done:
            new = self.done.popleft()
            if new.number in self._known:
                self._known.discard(new.number)
                taken.append(new)
        return taken

    def _begin(self) -> None:
        """Have threads do what may be done now."""
        while len(self._busy) < THREADS and (flow := self._queue.next(without=self._busy)) is not None:
            new = self._queue.take(flow)
            self._queue.mark(flow)
            self._busy.add(flow)
            self._threads.submit(self._run, new)

    def _run(self, new: Add) -> None:
        try:
            self._prepare(new.params)
        finally:
            with self._changing:
                self._busy.discard((new.owner.name,))
                self.done.append(new)
                self._begin()
