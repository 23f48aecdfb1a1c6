"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE = 120.0  # seconds for anything that a test waits for: no machine is so slow


def wait_until(condition: Callable[[], bool], every: float = 0.01, seconds: float = DEADLINE) -> None:
    """Look every so many seconds whether a condition holds. Fails after a time that is long for any machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(every)
