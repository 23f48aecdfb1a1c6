"""Errors of an engine that runs in its own process. Bad input is a ValueError or a TypeError, as everywhere."""

from __future__ import annotations


class EngineDeadError(RuntimeError):
    """The engine process has ended, or is being started again. The same request may be sent again later."""


class ShuttingDownError(EngineDeadError):
    """The engine takes no more requests, because it is being drained or has been shut down."""


class QueueFullError(RuntimeError):
    """Too many requests wait already. `retry_after` is an estimate of the seconds until there is room again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(TimeoutError):
    """The deadline of a request passed before its first token."""
