"""The lock of an engine, which threads share in turn, and its device, which they do not.

Kernels are launched, events made and graphs captured on the current device of the calling thread. So every public
method of the engine that reaches the device makes the engine's device the current one, and gives the caller's back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class FairLock:
    """A reentrant lock that threads get in about the order in which they ask: a thread that releases it and asks again
    at once, as the driver does after every step, queues behind those that wait."""

    def __init__(self, before_release: Callable[[], None]) -> None:
        self.closed: str | None = None  # why nothing may be done under it any more
        self._before_release = before_release
        self._queue, self._lock = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._stepping = False

    @property
    def held(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    @property
    def in_step(self) -> bool:
        """Return whether the calling thread is in mid-step, in a user's function that the step has called."""
        return self.held and self._stepping

    def __enter__(self) -> None:
        self._take()
        if self.closed is not None:
            self.__exit__()
            raise RuntimeError(self.closed)

    @contextmanager
    def unless_closed(self) -> Iterator[bool]:
        """Hold the lock even if it is closed; the context is whether it is open."""
        self._take()
        try:
            yield self.closed is None
        finally:
            self.__exit__()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the thread that holds the lock as being in a step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check_between_steps(self) -> None:
        """Raise RuntimeError in the middle of a step, whose requests and pages must stay as it found them."""
        if self.in_step:
            raise RuntimeError(
                "a function that a step calls, such as a logits processor, cannot change the engine or run requests: "
                "do it when the step has ended, outside the function"
            )

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1 and self.closed is None:
                self._before_release()
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._lock.release()

    def try_enter(self) -> bool:
        """Take the lock if no thread has it, not even this one."""
        if not self._lock.acquire(blocking=False):
            return False
        self._become_owner()
        self._depth = 1
        return True

    def _take(self) -> None:
        if not self.held:
            with self._queue:
                self._lock.acquire()
            self._become_owner()
        self._depth += 1

    def _become_owner(self) -> None:
        self._owner = threading.get_ident()
        self._stepping = False  # also where a second Ctrl-C has cut off the end of the last step


def with_index(device: torch.device) -> torch.device:
    """Return `device` with its number: "cuda" alone means the current one, now and later."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one within a block; do nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Shared(Protocol):
    """An engine, or what stands for one."""

    @property
    def lock(self) -> FairLock: ...

    @property
    def device(self) -> torch.device: ...


S = TypeVar("S", bound=_Shared)


def exclusive(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a method hold the lock of its object, run on its device, and refuse to run in the middle of a step."""

    @wraps(method)
    def locked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock, current(self.device):
            self.lock.check_between_steps()
            return method(self, *args, **kwargs)

    return locked
