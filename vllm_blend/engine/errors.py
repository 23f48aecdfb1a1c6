"""Errors of an engine that runs in its own process. Bad input is a ValueError or a TypeError, as everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_blend.executor.base import WorkerLostError


class EngineDeadError(RuntimeError):
    """The engine process, or one that shares its model, has ended or hangs, or the engine is being started again. The
    same request may be sent again later."""


@contextmanager
def dead_if_lost() -> Iterator[None]:
    """Raise EngineDeadError if a worker is lost meanwhile."""
    try:
        yield
    except WorkerLostError as error:
        raise EngineDeadError(str(error)) from error


class ShuttingDownError(EngineDeadError):
    """The engine takes no more requests, because it is being drained or has been shut down."""


class QueueFullError(RuntimeError):
    """Too many requests wait already. `retry_after` is an estimate of the seconds until there is room again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(TimeoutError):
    """The deadline of a request passed before its first token."""
