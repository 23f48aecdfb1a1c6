"""The memory of a test run: what tests dropped is freed in time, and a run that takes too much fails."""

from __future__ import annotations

import ctypes
import gc
import resource
from pathlib import Path

LIMIT_GIB = 4.0
COLLECT_AFTER = 64 << 20  # bytes that the process may grow by until dropped engines are looked for: it takes a while

_libc = ctypes.CDLL(None)
_at_last_collection = 0


def settle() -> None:
    """Spare later collections what has been imported: hundreds of thousands of objects that are never freed."""
    gc.collect()
    gc.freeze()


def free_dropped() -> None:
    """Free dropped engines if the process has grown. They are in reference cycles, and to Python a few objects only."""
    if resident_bytes() - _at_last_collection > COLLECT_AFTER:
        collect()


def collect() -> None:
    """Free what nothing refers to from outside, and give its memory back."""
    global _at_last_collection
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)  # glibc keeps hundreds of MiB of freed weights between small allocations
    _at_last_collection = resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_gib() -> float:
    """Return the largest resident size that this process has had."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 2**20
