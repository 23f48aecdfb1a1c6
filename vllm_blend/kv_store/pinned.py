"""Page-locked host memory: what a GPU copies from and to by itself, at the full speed of its link."""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context


def pinned_buffer(num_bytes: int, setting: str) -> np.ndarray:
    """[num_bytes] uint8 of page-locked memory, exactly that much: torch's own pinned allocator would round up to a
    power of two.

    `setting` is what errors tell the user to lower. Raises ValueError where the host has too little memory. The memory
    is unlocked and given back when the array and every view of it are gone.
    """
    available = _available_bytes()
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


def _available_bytes() -> int | None:
    """Memory that can be taken without swapping, None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
