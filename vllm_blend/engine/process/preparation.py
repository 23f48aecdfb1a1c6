"""The requests whose preparation takes long, such as compiling a grammar: done in threads, in turn over tenants."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

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
        self._waiting: dict[str, deque[Add]] = {}  # by tenant
        self._turns: dict[str, int] = {}  # the number of each tenant's last turn
        self._num_turns = 0
        self._busy: set[str] = set()  # tenants
        self._known: set[int] = set()  # numbers of the requests that are wanted
        self._changing = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    def __len__(self) -> int:
        """Return how many requests wait or are being prepared."""
        return len(self._known)

    def add(self, new: Add) -> None:
        """Queue a request. Raises QueueFullError if as many of its tenant wait as may."""
        with self._changing:
            queue = self._waiting.setdefault(new.tenant, deque())
            if len(queue) >= MAX_WAITING:
                raise QueueFullError(
                    f"{MAX_WAITING} requests wait for their structured outputs to be compiled, as many as may: try "
                    "again in a few seconds",
                    retry_after=5.0,
                )
            queue.append(new)
            self._known.add(new.number)
            self._begin()

    def drop(self, number: int) -> None:
        """Forget a request. What is being prepared for it is prepared to the end."""
        with self._changing:
            if number not in self._known:
                return
            self._known.discard(number)
            for tenant, queue in list(self._waiting.items()):
                kept = deque(each for each in queue if each.number != number)
                self._waiting[tenant] = kept
                if not kept:
                    del self._waiting[tenant]

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
        while len(self._busy) < THREADS and (free := [each for each in self._waiting if each not in self._busy]):
            tenant = min(free, key=lambda tenant: self._turns.get(tenant, 0))
            new = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            self._num_turns += 1
            self._turns[tenant] = self._num_turns
            self._busy.add(tenant)
            self._threads.submit(self._run, new)

    def _run(self, new: Add) -> None:
        try:
            self._prepare(new.params)
        finally:
            with self._changing:
                self._busy.discard(new.tenant)
                self.done.append(new)
                self._begin()
