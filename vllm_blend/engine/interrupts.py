"""Ctrl-C during a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C wait until a step is over: cut off in the middle, it would leave the requests of other callers half
    entered. A second Ctrl-C is raised at once."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    pending: list[int] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        if pending:
            usual(number, frame)
        pending.append(number)

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pending:
            raise KeyboardInterrupt
