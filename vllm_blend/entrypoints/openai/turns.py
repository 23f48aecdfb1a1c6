"""Work that is done a piece at a time, tenants or addresses in turn: one that sends much keeps no other waiting for all
of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm_blend.core.turns import TurnQueue


class Turns:
    """Lets one task on at a time. Of those that wait, the tenant is next whose last turn was longest ago, and of a
    tenant's the kind; tasks of one kind keep their order. It belongs to one event loop."""

    def __init__(self) -> None:
        self._is_taken = False
        self._queue: TurnQueue[asyncio.Future[None]] = TurnQueue()

    @asynccontextmanager
    async def turn(self, tenant: str, kind: str = "") -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context."""
        flow = (tenant, kind)
        if self._is_taken:
            future = asyncio.get_running_loop().create_future()
            self._queue.add(flow, future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():  # it was given the turn
                    self._give()
                raise
        self._is_taken = True
        self._queue.mark(flow)
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


class Pace:
    """Lets so many tasks on in one round of the event loop; those that wait go on in the next rounds, addresses in
    turn. What else the loop has to do is done between: a thousand requests at once hold no stream up. It belongs to one
    event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit
        self._is_counting = False
        self._queue: TurnQueue[asyncio.Future[None]] = TurnQueue()

    async def wait(self, address: str) -> None:
        """Return in this round if few tasks have come on in it, else in a later one."""
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._begin_round)
        if self._left > 0:
            self._left -= 1
            return
        future = asyncio.get_running_loop().create_future()
        self._queue.add(("", address), future)  # two names: an address without requests is forgotten
        await future

    def _begin_round(self) -> None:
        self._left = self._limit
        while self._left > 0 and (flow := self._queue.next()) is not None:
            future = self._queue.take(flow)
            self._queue.mark(flow)
            if not future.done():
                self._left -= 1
                future.set_result(None)
        self._is_counting = self._left < self._limit
        if self._is_counting:
            asyncio.get_running_loop().call_soon(self._begin_round)
