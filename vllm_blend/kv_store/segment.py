"""Segments: files of many chunks, each chunk a run of whole 4 KiB pages, written once and never moved.

A segment only grows. What is evicted from it goes back to the file system at once, as a hole: nothing has to be
copied to win space back, and a file without chunks is removed. Where a file system cannot punch holes, space comes
back with the whole segment (`can_punch`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from errno import EINVAL, ENOSYS, EOPNOTSUPP
from pathlib import Path

import torch

from vllm_blend.kv_store.host_memory import PAGE, aligned_empty
from vllm_blend.kv_store.layout import ChunkFault
from vllm_blend.kv_store.regular_file import NotRegular, open_regular

logger = logging.getLogger(__name__)

SUFFIX = ".segment"
MAX_OPEN = 128  # files
MAX_VECTORS = 1024  # pieces of memory that the system takes at once
_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01  # FALLOC_FL_*
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of a chunk: bytes of a segment, both numbers multiples of 4 KiB."""

    segment: str
    offset: int
    num_bytes: int

    @property
    def stop(self) -> tuple[str, int]:
        """Return segment and offset of the extent that would follow."""
        return self.segment, self.offset + self.num_bytes


class _OpenFile:
    """An open file, closed with the last reference: no reader can find its descriptor taken over by another file."""

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = open_regular(path, flags)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class SegmentFiles:
    """Reads and writes extents of the segments in `folder`. Safe to use from several threads.

    With `direct`, past the page cache (O_DIRECT), where the file system takes that.
    """

    def __init__(self, folder: Path, direct: bool) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self.direct, self.can_punch = self._probe(direct)

    def read(self, extent: Extent, start: int, into: torch.Tensor) -> None:
        """Fill `into` ([whole pages] uint8, page-aligned) from byte `start` of an extent.

        Raises ChunkFault if the file is gone or too short, and OSError if it cannot be read.
        """
        self.read_adjacent(extent.segment, extent.offset + start, [into])

    def read_adjacent(self, segment: str, offset: int, into: Sequence[torch.Tensor]) -> None:
        """Fill pieces that lie one behind the other in a segment as `read` does, with as few reads as that takes."""
        try:
            file = self._open(segment)
        except FileNotFoundError as error:
            raise ChunkFault("vanished", f"{segment}{SUFFIX} is gone") from error
        except NotRegular as error:
            raise ChunkFault("damaged", str(error)) from error
        views, at = [piece.numpy().data for piece in into], offset
        while views:
            count = os.preadv(file.fd, views[:MAX_VECTORS], at)
            if count == 0 or (self.direct and count % PAGE):  # a direct read ends on a page, or with the file
                raise ChunkFault("truncated", f"{segment}{SUFFIX} ends at byte {at + count}")
            views, at = _drop_bytes(views, count), at + count

    def write(self, pieces: Sequence[tuple[Extent, torch.Tensor]]) -> None:
        """Write payloads, each [extent.num_bytes] uint8 and page-aligned, and return when they are on the disk."""
        files: dict[str, _OpenFile] = {}
        for first, payloads in _adjacent(pieces):
            file = files.setdefault(first.segment, self._open(first.segment, create=True))
            views, at = [payload.numpy().data for payload in payloads], first.offset
            while views:
                count = os.pwritev(file.fd, views[:MAX_VECTORS], at)
                views, at = _drop_bytes(views, count), at + count
        for file in files.values():
            os.fdatasync(file.fd)

    def punch(self, extent: Extent) -> None:
        """Give the space of an extent back; nothing happens when the file is gone, or something else is there."""
        try:
            file = self._open(extent.segment)
        except (FileNotFoundError, NotRegular):
            return
        _punch(file.fd, extent.offset, extent.num_bytes)

    def unlink(self, segment: str) -> None:
        with self._lock:
            self._files.pop(segment, None)
        _unlink(self._path(segment))

    def unlink_others(self, known: Iterable[str]) -> None:
        """Remove the segments that are not in `known`."""
        keep = {self._path(segment) for segment in known}
        for path in self.folder.glob(f"*{SUFFIX}"):
            if path not in keep:
                _unlink(path)

    def close(self) -> None:
        with self._lock:
            self._files.clear()

    def _path(self, segment: str) -> Path:
        return self.folder / f"{segment}{SUFFIX}"

    def _open(self, segment: str, create: bool = False) -> _OpenFile:
        with self._lock:
            file = self._files.get(segment)
            if file is not None and os.fstat(file.fd).st_nlink > 0:
                self._files.move_to_end(segment)
                return file
            self._files.pop(segment, None)
            flags = os.O_RDWR | (os.O_DIRECT if self.direct else 0)
            try:
                file = _OpenFile(self._path(segment), flags)
            except FileNotFoundError:
                if not create:
                    raise
                file = self._create(segment, flags)  # or open it: another process may have made it by now
            except NotRegular:
                if not create:
                    raise
                _unlink(self._path(segment))  # what has taken the place of a segment: its chunks are lost either way
                file = self._create(segment, flags)
            self._files[segment] = file
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)
            return file

    def _create(self, segment: str, flags: int) -> _OpenFile:
        file = _OpenFile(self._path(segment), flags | os.O_CREAT)
        _sync_folder(self.folder)
        return file

    def _probe(self, direct: bool) -> tuple[bool, bool]:
        """Return whether the file system can do direct reads and writes of pages, and punch holes."""
        path = self.folder / f"probe-{os.getpid()}-{threading.get_ident()}"
        page = aligned_empty(PAGE)
        try:
            file = _OpenFile(path, os.O_RDWR | os.O_CREAT)
            os.ftruncate(file.fd, PAGE)
            can_direct = can_punch = False
            if direct:
                can_direct = _try_direct(path, page)
            try:
                _punch(file.fd, 0, PAGE)
                can_punch = True
            except OSError as error:
                if error.errno not in (EOPNOTSUPP, ENOSYS, EINVAL):
                    raise
        finally:
            path.unlink(missing_ok=True)
        if direct and not can_direct:
            logger.info("%s takes no direct reads and writes: they go through the page cache", self.folder)
        if not can_punch:
            logger.info("%s cannot punch holes: space comes back with whole segments", self.folder)
        return can_direct, can_punch


def _adjacent(pieces: Sequence[tuple[Extent, torch.Tensor]]) -> list[tuple[Extent, list[torch.Tensor]]]:
    """Return runs of payloads that lie one behind the other, each with the extent of its first one."""
    runs: list[tuple[Extent, list[torch.Tensor]]] = []
    stop: tuple[str, int] | None = None
    for extent, payload in sorted(pieces, key=lambda piece: (piece[0].segment, piece[0].offset)):
        if stop != (extent.segment, extent.offset):
            runs.append((extent, []))
        runs[-1][1].append(payload)
        stop = extent.stop
    return runs


def _unlink(path: Path) -> None:
    """Remove a segment's file, where it is there; a folder that has its name is left alone."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        logger.warning("%s is a folder, not a segment: move it away", path)


def _drop_bytes(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of views when `count` bytes are done."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def _sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _try_direct(path: Path, page: torch.Tensor) -> bool:
    try:
        file = _OpenFile(path, os.O_RDWR | os.O_DIRECT)
        os.preadv(file.fd, [page.numpy().data], 0)
    except OSError as error:
        if error.errno in (EINVAL, EOPNOTSUPP):
            return False
        raise
    return True


def _punch(fd: int, offset: int, num_bytes: int) -> None:
    mode = _PUNCH_HOLE | _KEEP_SIZE
    if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
