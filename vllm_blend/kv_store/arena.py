"""One large buffer, handed out in pieces that come back by themselves when nobody holds them any more.

Pinning host memory costs about a millisecond for every few MiB, so it is done once and for all; chunks come and go.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque

import numpy as np
import torch

ALIGNMENT = 4096  # bytes: a page, and what unbuffered reads from a disk want


class Arena:
    """Pieces of a [bytes] uint8 buffer, best fit first, neighbours merged when they are free.

    A piece is a tensor. It returns to the arena when the last tensor that shares its memory is gone, in whatever
    thread that happens; views of it count. Whoever reads or writes it asynchronously must hold on to it meanwhile.
    """

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer
        self.num_bytes = len(buffer) // ALIGNMENT * ALIGNMENT
        self._used = 0
        self._starts = [0] if self.num_bytes else []  # of the free ranges, ascending
        self._sizes = [self.num_bytes] if self.num_bytes else []
        self._returned: deque[tuple[int, int]] = deque()  # appending is atomic: no lock, also from a finalizer

    @property
    def num_bytes_used(self) -> int:
        """Bytes of the pieces that somebody holds."""
        self._take_back()
        return self._used

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """A piece of `num_bytes` [bytes] uint8, of undefined content; None where no free range is that long."""
        self._take_back()
        size = piece_bytes(num_bytes)
        fitting = [index for index, free in enumerate(self._sizes) if free >= size]
        if size == 0 or not fitting:
            return None
        index = min(fitting, key=self._sizes.__getitem__)
        start = self._starts[index]
        if self._sizes[index] == size:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += size
            self._sizes[index] -= size
        self._used += size
        memory = self._buffer[start : start + num_bytes]
        piece = torch.from_numpy(memory)  # its storage holds `memory`, and that the buffer
        weakref.finalize(memory, self._returned.append, (start, size)).atexit = False
        return piece

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor on the host lies in the arena."""
        start = self._buffer.ctypes.data
        return tensor.device.type == "cpu" and start <= tensor.data_ptr() < start + self.num_bytes

    def _take_back(self) -> None:
        while self._returned:
            start, size = self._returned.popleft()
            self._used -= size
            index = bisect_left(self._starts, start)
            if index < len(self._starts) and start + size == self._starts[index]:
                size += self._sizes[index]
                del self._starts[index], self._sizes[index]
            if index > 0 and self._starts[index - 1] + self._sizes[index - 1] == start:
                self._sizes[index - 1] += size
            else:
                self._starts.insert(index, start)
                self._sizes.insert(index, size)


def piece_bytes(num_bytes: int) -> int:
    """What a piece of `num_bytes` takes of an arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
