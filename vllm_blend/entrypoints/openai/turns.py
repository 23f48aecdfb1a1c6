"""Work that is done one piece at a time, tenants in turn: one that sends much keeps no other waiting for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm_blend.core.turns import TurnQueue


class Turns:
    """Lets one task on at a time. Of those that wait, the tenant is next whose last turn was longest ago; the tasks of
    a tenant keep their order. It belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._queue: TurnQueue[asyncio.Future[None]] = TurnQueue()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context."""
        if self._is_taken:
            future = asyncio.get_running_loop().create_future()
            self._queue.add((tenant,), future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():  # it was given the turn
                    self._give()
                raise
        self._is_taken = True
        self._queue.mark((tenant,))
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        """Give the turn to the next task that still waits."""
        self._is_taken = False
        while (flow := self._queue.next()) is not None:
            future = self._queue.take(flow)
            if not future.done():
                self._is_taken = True
                future.set_result(None)
                return
