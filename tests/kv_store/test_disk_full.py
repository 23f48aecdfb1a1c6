"""A full disk: writing stops with one warning, reading goes on, and writing begins again when there is room."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sqlite3
import tempfile
import warnings
from errno import ENOSPC
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.clock import Clock
from tests.kv_store.disk_processes import Child, open_store
from tests.kv_store.stored_chunks import PAGE, bytes_on_disk, key, same, segments, sized
from vllm_blend.kv_store import circuit_breaker
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.space import DiskSpace

DISK, BUDGET, CHUNK = 4096, 65536, 64  # pages
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18


class Heard(logging.Handler):
    """A handler that keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("vllm_blend").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def system(what: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), what)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount_small_disk(folder: Path) -> None:
    """A tmpfs that only this process sees. Raises OSError where that is not allowed."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        system("unshare", CLONE_NEWNS)
    else:
        system("unshare", CLONE_NEWNS | CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    system("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    system("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % (DISK * PAGE))


def all_right(store: DiskChunkStore, count: int) -> None:
    for number in range(count):
        assert same(store.get(key(number)), sized(CHUNK)), number


def fill(store: DiskChunkStore) -> int:
    """Put chunks until one does not fit; how many did."""
    for number in range(10_000):
        store.put(key(number), sized(CHUNK))
        if key(number) not in store:
            return number
    raise AssertionError("it is not full")


def use_a_full_disk(connection: Connection, folder: Path, mount: bool) -> None:
    """Send what went wrong, or None, and whether the small disk was refused."""
    try:
        if mount:
            mount_small_disk(folder)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (DISK * PAGE, DISK * PAGE))
    except OSError as error:
        connection.send(("refused", str(error)))
        return
    heard = Heard()
    clock = Clock(pytest.MonkeyPatch(), circuit_breaker)  # for as long as this process lives
    try:
        with open_store(folder, BUDGET, retry_seconds=0.5, num_threads=2) as store:
            count = fill(store)
            assert DISK // 2 < count * CHUNK <= DISK
            for number in range(900, 920):
                store.put(key(number), sized(CHUNK))
            all_right(store, count)
            assert store.stats.refused == {"failed": 1, "writes_off": 20} and len(store) == count
            [message] = heard.messages
            assert "chunks are not stored, tried again every 0.5 s" in message
            assert store.num_bytes == bytes_on_disk(folder) == count * CHUNK * PAGE  # nothing is left of what failed
            store.remove(key(count - 1))
            store.remove(key(count - 2))
            clock.advance(0.6)
            if mount:  # with a limit on files, what was removed from this one is of no use
                store.put(key(990), sized(CHUNK))
                assert same(store.get(key(990)), sized(CHUNK))
                fill_to_the_last_byte(store, folder, heard, count - 2, clock)
            else:
                all_right(store, count - 2)
        if mount:
            open_on_a_full_disk(folder, count - 3)
        connection.send(("done", None))
    except BaseException as error:
        import traceback

        connection.send(("failed", "".join(traceback.format_exception(error))))


def fill_to_the_last_byte(store: DiskChunkStore, folder: Path, heard: Heard, count: int, clock: Clock) -> None:
    """Fill the disk until not even the index can grow any more."""
    heard.messages.clear()
    with (folder / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(bytes(PAGE))
    for number in range(500, 800):
        store.put(key(number), sized(1))
        clock.advance(0.01)
        assert same(store.get(key(number % count)), sized(CHUNK))
    with segments(folder)[0].open("r+b") as file:
        file.write(b"\xff")
    for _ in range(3):
        assert store.get(key(0)) is None and key(0) not in store
    assert len([message for message in heard.messages if "computed again" in message]) == 1
    assert len([message for message in heard.messages if "are not stored" in message]) <= 1
    assert store.num_bytes <= store.config.budget_bytes
    (folder / "filler").unlink()
    clock.advance(0.6)
    store.put(key(0), sized(CHUNK))
    all_right(store, count)


def open_on_a_full_disk(folder: Path, count: int) -> None:
    """The next process says that the disk is full, or reads; when there is room, all is there."""
    with (folder / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(bytes(PAGE))
    try:
        store = open_store(folder, BUDGET)
    except Exception as error:
        assert "full" in str(error) or "space" in str(error) or "disk" in str(error), error
    else:
        all_right(store, count)
        store.close()
    (folder / "filler").unlink()
    with open_store(folder, BUDGET) as store:
        all_right(store, count)


def open_what_filled_its_disk(connection: Connection, folder: Path) -> None:
    """Chunks and the index take all that there is: the next process reads, and says that it cannot store."""
    try:
        mount_small_disk(folder)
        with open_store(folder, BUDGET, retry_seconds=1e-9, num_threads=2) as store:
            for number in range(DISK + 200):
                store.put(key(number), sized(1))
            count = len(store)
            assert store.stats.refused["failed"] > 100 and count > DISK // 4
        heard = Heard()
        with open_store(folder, BUDGET, num_threads=2) as store:
            assert len(store) == count
            for number in range(0, count, 7):
                assert same(store.get(key(number)), sized(1)), number
            store.put(key(9999), sized(CHUNK))
            assert store.get(key(9999)) is None
        assert any("disk is full" in each or "No space" in each for each in heard.messages), heard.messages
        connection.send(("done", None))
    except BaseException as error:
        import traceback

        connection.send(("failed", "".join(traceback.format_exception(error))))


def try_to_mount(connection: Connection, folder: Path) -> None:
    """Send why the small disk was refused, or None."""
    try:
        mount_small_disk(folder)
    except OSError as error:
        connection.send(str(error))
    else:
        connection.send(None)


@cache
def mounts() -> bool:
    """Return whether a process may have a small disk of its own here."""
    with tempfile.TemporaryDirectory() as folder, Child(try_to_mount, Path(folder)) as child:
        refusal: str | None = child.receive()
    return refusal is None


@pytest.mark.skipif("not mounts()", reason="no process may have a tmpfs of its own here")
def test_a_store_that_filled_its_disk_is_opened_again(tmp_path: Path) -> None:
    with Child(open_what_filled_its_disk, tmp_path) as child:
        outcome, detail = child.receive()
    assert outcome == "done", detail


@pytest.mark.parametrize("error", [sqlite3.OperationalError("database or disk is full"), OSError(ENOSPC, "No space")])
def test_what_dead_processes_left_may_stay(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where an index cannot even be changed, what is stored can be read."""
    with open_store(tmp_path, BUDGET) as store:
        store.put(key(1), sized(1))

    def fail(space: DiskSpace) -> None:
        raise error

    monkeypatch.setattr(DiskSpace, "_clear_away", fail)
    with open_store(tmp_path, BUDGET) as store:
        assert same(store.get(key(1)), sized(1))
    assert "the disk is full" in caplog.text


def run(folder: Path, mount: bool) -> str | None:
    """Why the small disk was refused, if it was."""
    with Child(use_a_full_disk, folder, mount) as child:
        outcome, detail = child.receive()
    if outcome == "failed":
        raise AssertionError(detail)
    refusal: str | None = detail
    return refusal


def test_a_full_file_system(tmp_path: Path) -> None:
    refused = run(tmp_path, mount=True)
    if refused is not None:
        warnings.warn(f"no tmpfs of its own ({refused}): a limit on the size of files stands in for it", stacklevel=1)
        run(tmp_path, mount=False)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    assert run(tmp_path, mount=False) is None
