"""Opening files that others may have put where ours are expected: only regular ones, and without ever waiting.

A file that is written must be the file itself: a symbolic link at its place would have some other file overwritten.
Folders on the way to it may be links.
"""

from __future__ import annotations

import os
import stat
from errno import ELOOP
from pathlib import Path

_NEVER_WAIT = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotRegular(OSError):
    """There is something else than a file that holds bytes: a folder, a FIFO, a socket, a device, a link to itself, or
    any link where a file is to be written."""


def require_regular(path: Path, follow_link: bool = True) -> None:
    """Raise NotRegular where there is something else than a regular file. A path with nothing there is fine."""
    try:
        mode = os.stat(path, follow_symlinks=follow_link).st_mode
    except FileNotFoundError:
        return
    except OSError as error:  # a symbolic link that leads to itself, a folder that is none
        raise NotRegular(error.errno, f"{error.strerror}: it is not a regular file", str(path)) from error
    if not stat.S_ISREG(mode):
        raise NotRegular(None, f"{path} is {_name(mode)}, not a regular file: move it away")


def open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file. A symbolic link is followed only to read. Raises FileNotFoundError,
    NotRegular or another OSError."""
    reads = flags & os.O_ACCMODE == os.O_RDONLY
    require_regular(path, follow_link=reads)  # before it is opened: devices may act on that
    swapped = NotRegular(None, f"{path} is not a regular file: move it away")
    try:
        fd = os.open(path, flags | _NEVER_WAIT | (0 if reads else os.O_NOFOLLOW), 0o666)
    except OSError as error:
        if error.errno == ELOOP:
            raise swapped from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise swapped
    return fd


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return what a regular file holds. Raises OSError, also where that is more than `max_bytes`, of which nothing is
    read."""
    with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(None, f"it has {size} bytes, more than the {max_bytes} that it may have")
        return file.read(max_bytes)


def _name(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kinds[stat.S_IFLNK] = "a symbolic link"
    return kinds.get(stat.S_IFMT(mode), "a device")
