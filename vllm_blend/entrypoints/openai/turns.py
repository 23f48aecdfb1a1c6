"""Work that is done one piece at a time, tenants in turn: one that sends much keeps no other waiting for all of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Lets one task on at a time. Of those that wait, the tenant is next whose last turn was longest ago; the tasks of
    a tenant keep their order. It belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant
        self._last: dict[str, int] = {}  # the number of each tenant's last turn
        self._num_turns = 0

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context."""
        if self._is_taken:
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():  # it was given the turn
                    self._give()
                raise
        self._is_taken = True
        self._num_turns += 1
        self._last[tenant] = self._num_turns
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        """Give the turn to the next task that still waits."""
        self._is_taken = False
        while self._waiting:
            tenant = min(self._waiting, key=lambda tenant: self._last.get(tenant, 0))
            future = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not future.done():
                self._is_taken = True
                future.set_result(None)
                return
