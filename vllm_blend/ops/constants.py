"""Constant tensors that kernels read, kept for the life of the process.

A CUDA graph holds the addresses of what it reads. A constant that a cache evicts, or replaces by a larger one, would be
freed under the graphs that were captured with it, so nothing here is ever dropped: a device has at most one range for
each power of two, 16 bytes for every token of its largest step in all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

SMALLEST_RANGE = 1024
_KEPT: dict[tuple[str, int, torch.device], torch.Tensor] = {}


def arange(count: int, device: torch.device) -> torch.Tensor:
    """Return 0 .. count - 1 as int64 [count] on `device`, a view of a tensor that is never freed."""
    capacity = max(SMALLEST_RANGE, 1 << (count - 1).bit_length())
    return _kept(("arange", capacity, device), lambda: torch.arange(capacity, device=device))[:count]


def one(device: torch.device) -> torch.Tensor:
    """Return 1.0 as a float32 scalar on `device`, a tensor that is never freed."""
    return _kept(("one", 1, device), lambda: torch.ones((), device=device))


def _kept(key: tuple[str, int, torch.device], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the tensor of this key, made by the first caller.

    Raises RuntimeError if it would be made while a graph is being captured: it would lie in the graph's own memory, and
    hold nothing until the graph's first replay.
    """
    tensor = _KEPT.get(key)
    if tensor is None:
        if key[2].type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"a CUDA graph needs the constant {key} before it exists: run the step once first")
        tensor = _KEPT.setdefault(key, make())  # another thread may have been faster: all must share one tensor
    return tensor
