"""An engine runs on its own device, whichever thread calls it and whatever device that thread uses otherwise.

Kernels are launched, events made and graphs captured on the current device of the calling thread. So every public
method of the engine that reaches the device makes the engine's device the current one, and gives the caller's back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch


class HasDevice(Protocol):
    """Anything that has a device of its own."""

    @property
    def device(self) -> torch.device: ...


P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self", bound=HasDevice)


def with_index(device: torch.device) -> torch.device:
    """Return `device` with its number: "cuda" alone means the current one, now and later."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device the current one within a block; do nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def on_own_device(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Run a method with its object's device as the current one."""

    @wraps(method)
    def run(self: Self, *args: P.args, **kwargs: P.kwargs) -> R:
        with current(self.device):
            return method(self, *args, **kwargs)

    return run
