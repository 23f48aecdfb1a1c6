"""Time that tests make pass, in place of the machine's: what is late or due then does not depend on how busy it is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import ModuleType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class Clock:
    """Stands still until it is told to go on. Takes the place of the module `time`, of which it has `monotonic`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """The clock of these modules until the test ends."""
        self.now = 1000.0  # seconds
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class _Jumping(selectors.DefaultSelector):
    """Takes no time to wait: the clock of the loop goes on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is None:
            raise AssertionError("nothing will ever happen")
        self.now += 0.0 if found else max(0.0, timeout or 0.0)
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop whose time begins at 0, and goes on at once when all wait."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
