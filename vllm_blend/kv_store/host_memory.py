"""Host memory for chunks: aligned, page-locked, and one large buffer that is handed out in pieces.

Locking (pinning) memory, which a GPU then copies from and to by itself at the full speed of its link, costs about a
millisecond for every few MiB. So it is done once, for one buffer; chunks come and go.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from bisect import bisect_left
from collections import deque
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

PAGE = 4096  # bytes: a page of memory, and the unit of unbuffered reads from a disk
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """Return [num_bytes] uint8 of ordinary memory that starts on a page."""
    memory = torch.empty(num_bytes + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + num_bytes]


def piece_bytes(num_bytes: int) -> int:
    """Return what a piece of `num_bytes` takes of an arena."""
    return round_up(num_bytes, PAGE)


class Arena:
    """Pieces of a [bytes] uint8 buffer, best fit first; free neighbours are merged.

    A piece is a tensor. It returns to the arena when the last tensor that shares its memory is gone, in whatever
    thread that happens; views of it count. Code that reads or writes it asynchronously must hold on to it meanwhile.
    """

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer
        self.num_bytes = len(buffer) // PAGE * PAGE
        self._num_bytes_used = 0
        self._free = [(0, self.num_bytes)] if self.num_bytes else []  # start and size, ascending
        self._returned: deque[tuple[int, int]] = deque()  # appending is atomic: no lock, also from a finalizer

    @property
    def num_bytes_used(self) -> int:
        """Return the bytes of the pieces that are still referenced."""
        self._take_back()
        return self._num_bytes_used

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return a piece of `num_bytes` [bytes] uint8, of undefined content; None if no free range is that long."""
        self._take_back()
        size = piece_bytes(num_bytes)
        fitting = [(free, index) for index, (_, free) in enumerate(self._free) if free >= size]
        if size == 0 or not fitting:
            return None
        free, index = min(fitting)
        start, _ = self._free[index]
        self._free[index : index + 1] = [(start + size, free - size)] if free > size else []
        self._num_bytes_used += size
        memory = self._buffer[start : start + num_bytes]
        piece = torch.from_numpy(memory)  # its storage holds `memory`, and that the buffer
        weakref.finalize(memory, self._returned.append, (start, size)).atexit = False
        return piece

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the arena."""
        start = self._buffer.ctypes.data
        return tensor.device.type == "cpu" and start <= tensor.data_ptr() < start + self.num_bytes

    def _take_back(self) -> None:
        while self._returned:
            start, size = self._returned.popleft()
            self._num_bytes_used -= size
            first = last = bisect_left(self._free, (start, 0))
            if last < len(self._free) and start + size == self._free[last][0]:
                size += self._free[last][1]
                last += 1
            if first > 0 and sum(self._free[first - 1]) == start:
                first -= 1
                start, size = self._free[first][0], self._free[first][1] + size
            self._free[first:last] = [(start, size)]


def pinned_buffer(num_bytes: int, setting: str) -> np.ndarray:
    """Return [num_bytes] uint8 of page-locked memory, exactly that much: torch's own pinned allocator would round up to
    a power of two.

    `setting` is what errors tell the user to lower. Raises ValueError if the host has too little memory. The memory
    is unlocked and given back when the array and every view of it are gone.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{setting}: {num_bytes / 2**30:.1f} GiB of host memory cannot be pinned, as {available / 2**30:.1f} GiB "
            f"are available: lower {setting}"
        )
    start = time.perf_counter()
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    buffer = np.frombuffer(memory, np.uint8)
    torch.from_numpy(buffer).zero_()  # in many threads: left to CUDA, one alone would make the pages
    address = buffer.ctypes.data
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
    if int(code) != 0:
        raise ValueError(
            f"{setting}: CUDA refused to pin {num_bytes / 2**30:.1f} GiB of host memory (error {int(code)}): lower "
            f"{setting}, or the memory that other processes use"
        )
    weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
    logger.info("pinned %.1f GiB of host memory in %.1f s", num_bytes / 2**30, time.perf_counter() - start)
    return buffer


def available_bytes() -> int | None:
    """Return how much memory can be taken without swapping; None if the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
