"""Locks on single numbers, between processes: byte n of an empty file.

They belong to an open file, so that several stores in one process do not share them, and the kernel drops them when
their process is gone, however it ended: nothing has to expire, and no process id can be mistaken for another's.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections import Counter
from errno import EACCES, EAGAIN
from pathlib import Path

from vllm_blend.kv_store.regular_file import open_regular


class NumberLocks:
    """Each number is free, held by any number of readers, or claimed by one owner. Nothing ever waits."""

    def __init__(self, path: Path) -> None:
        # Two open files: what one of them holds keeps the other out, also within this process.
        self._readers_fd, self._owner_fd = (open_regular(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
        self._lock = threading.Lock()
        self._readers: Counter[int] = Counter()
        self._claimed: set[int] = set()

    def share(self, number: int) -> bool:
        """Keep others from claiming `number`. Return False if it is claimed. Counted: `unshare` as often."""
        with self._lock:
            if not self._readers[number] and not _set(self._readers_fd, fcntl.F_RDLCK, number):
                return False
            self._readers[number] += 1
            return True

    def unshare(self, number: int) -> None:
        with self._lock:
            self._readers[number] -= 1
            if self._readers[number] <= 0:
                del self._readers[number]
                _set(self._readers_fd, fcntl.F_UNLCK, number)

    def claim(self, number: int) -> bool:
        """Own `number`. Return False if it is held or claimed, here or elsewhere."""
        with self._lock:
            if number in self._claimed or not _set(self._owner_fd, fcntl.F_WRLCK, number):
                return False
            self._claimed.add(number)
            return True

    def unclaim(self, number: int) -> None:
        with self._lock:
            self._claimed.discard(number)
            _set(self._owner_fd, fcntl.F_UNLCK, number)

    def close(self) -> None:
        """Release everything."""
        for fd in (self._readers_fd, self._owner_fd):
            os.close(fd)


def _set(fd: int, kind: int, number: int) -> bool:
    flock = struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, flock)
    except OSError as error:
        if error.errno in (EACCES, EAGAIN):
            return False
        raise
    return True
