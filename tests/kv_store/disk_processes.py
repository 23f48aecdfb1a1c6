"""Processes that use a disk store, and may be killed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.forked import context
from tests.kv_store.stored_chunks import MODEL, PAGE, bytes_on_disk, chunk, hold, key, same, sized
from tests.waiting import DEADLINE
from vllm_blend.kv_store import segment
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.index_rows import Entry
from vllm_blend.kv_store.store_config import DiskStoreConfig


def open_store(folder: Path, budget_pages: int, **settings: Any) -> DiskChunkStore:
    """Open a store whose deadline no machine is too slow for, unless `settings` have another one."""
    return DiskChunkStore(DiskStoreConfig(folder, budget_pages * PAGE, MODEL, **({"timeout": DEADLINE} | settings)))


class Child:
    """A process that runs `function(connection, *arguments)`; in the end it is gone, whatever it does."""

    def __init__(self, function: Callable[..., None], *arguments: object, **named: object) -> None:
        self.connection, theirs = context.Pipe()
        whole: dict[str, Any] = {"target": function, "args": (theirs, *arguments), "kwargs": named}
        self.process: BaseProcess = context.Process(**whole, daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def receive(self) -> Any:
        assert self.connection.poll(DEADLINE), "a process says nothing"
        return self.connection.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> int | None:
        """Its exit code."""
        self.process.kill()
        self.process.join(DEADLINE)
        return self.process.exitcode


def churn(
    connection: Connection,
    folder: Path,
    budget_pages: int,
    seed: int,
    mistakes: int | None = None,
    says: int | None = None,
) -> None:
    """Put, get, hold and remove chunks until this process is killed, or `mistakes` rounds have gone by. Sends what
    was wrong; and before that how many rounds it has done, once, when these are `says` (0: before it opens the
    store)."""
    if says == 0:
        connection.send(says)
    choose, held = random.Random(seed), list[Entry]()
    store = open_store(folder, budget_pages, segment_bytes=budget_pages * PAGE // 2, num_threads=2)
    wrong: list[str] = []
    rounds = 0
    while mistakes is None or rounds < mistakes:
        rounds += 1
        name, what = key(choose.randrange(60)), choose.random()
        if what < 0.35:
            store.put(name, chunk(name), choose.uniform(1, 100))
        elif what < 0.45:
            names = dict.fromkeys(key(choose.randrange(60)) for _ in range(4))
            store.put_many([(name, chunk(name)) for name in names], choose.uniform(1, 100))
        elif what < 0.9:
            names_read = [name, *(key(choose.randrange(60)) for _ in range(choose.randrange(4)))]
            for one, pending in zip(names_read, store.read_many(names_read), strict=True):
                found = None if pending is None else pending.wait()
                if found is not None and not same(found, chunk(one)):
                    wrong.append(f"{one} is not what was put")
        elif what < 0.95:
            store.remove(name)
        elif (entry := hold(store, name)) is not None:
            held.append(entry)
            if len(held) > 3:
                store.space.release(held.pop(0))
        if store.num_bytes > store.config.budget_bytes:
            wrong.append("the budget is exceeded")
        if rounds == says:
            connection.send(rounds)
    wrong += [f"{kind}: {count}" for kind, count in store.stats.misses.items() if kind != "absent"]
    refused = store.stats.refused.keys() - {"present", "no_room"}
    connection.send((wrong + sorted(refused), store.stats.num_hits))
    store.close()


def die_at_step(connection: Connection, folder: Path, step: int | None) -> None:
    """A fixed sequence of puts, evictions, replacements and removals, killed before its `step`th touch of the disk or
    of the index. Without `step`, sends how many there are."""
    count = 0

    def touch(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    class Connected(sqlite3.Connection):
        def execute(self, *arguments: Any) -> sqlite3.Cursor:
            cursor: sqlite3.Cursor = touch(super().execute, *arguments)
            return cursor

        def executemany(self, *arguments: Any) -> sqlite3.Cursor:
            cursor: sqlite3.Cursor = touch(super().executemany, *arguments)
            return cursor

    sqlite3.connect = partial(sqlite3.connect, factory=Connected)  # type: ignore[assignment]
    for module, name in ((os, "pwritev"), (os, "fdatasync"), (os, "open"), (os, "fsync"), (segment, "_punch")):
        setattr(module, name, partial(touch, getattr(module, name)))
    unlink = Path.unlink
    Path.unlink = lambda path, missing_ok=False: touch(unlink, path, missing_ok)  # type: ignore[assignment]

    with open_store(folder, 12, segment_bytes=8 * PAGE, num_threads=1) as store:
        for number in range(5):
            store.put(key(number), sized(3), 10 + number)
        store.get(key(4))
        store.put(key(3), sized(2), 10)
        store.remove(key(4))
        store.put(key(5), sized(9), 10)
        store.put_many([(key(number), sized(2)) for number in (6, 7, 3)], 10)
    connection.send(count)


def check_after_a_crash(folder: Path, budget_pages: int, expected: Callable[[str], Any]) -> int:
    """Open the store as the next process does: it has right chunks only, nothing lies about, and every byte is counted.
    Returns how many chunks there are."""
    with open_store(folder, budget_pages, num_threads=2) as store:
        live = store.space.index.live()
        for entry in live:
            assert any(same(store.get(entry.key), kv) for kv in expected(entry.key))
        assert store.stats.num_misses == 0
        assert not store.space.index.unfinished()
        sums = store.num_bytes, sum(entry.extent.num_bytes for entry in live), bytes_on_disk(folder)
        assert len(set(sums)) == 1, sums
        assert store.num_bytes <= store.config.budget_bytes
        named = {path.name.removesuffix(".segment") for path in folder.glob("v1/*.segment")}
        assert named == {entry.extent.segment for entry in live}
        return len(live)


def put_in_turns(connection: Connection, folder: Path, name: str, tokens: int, rounds: int) -> None:
    """Put one key again and again, each time other KV than the last time, until the connection says that it is
    enough."""
    with open_store(folder, 400, num_threads=1) as store:
        while not connection.poll():
            for number in range(rounds):
                store.put(name, chunk(name, tokens + number % 2))
        connection.send(store.stats.refused.keys() - {"present"})


def hold_chunks(connection: Connection, folder: Path, names: list[str]) -> None:
    store = open_store(folder, 8, num_threads=1)
    connection.send([hold(store, name) is not None for name in names])
    time.sleep(10 * DEADLINE)


def write_slowly(connection: Connection, folder: Path, name: str, pages: int) -> None:
    """Put a chunk of which half is written when the connection says so, and the rest when it is answered."""
    write = os.pwritev

    def halves(fd: int, buffers: Any, offset: int) -> int:
        count = write(fd, [buffers[0][: pages // 2 * PAGE]], offset)
        connection.send("half")
        connection.recv()
        return count

    with open_store(folder, 8, num_threads=1) as store:
        os.pwritev = halves  # type: ignore[assignment]
        store.put(name, sized(pages), 100)
    connection.send("done")


def stay_in_a_transaction(connection: Connection, folder: Path) -> None:
    with open_store(folder, 8, num_threads=1) as store, store.space.index.transaction():
        connection.send("inside")
        connection.recv()
    connection.send("outside")
