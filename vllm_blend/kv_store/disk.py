"""Chunk KV on a disk, under a byte budget, shared by any number of processes of one machine.

    folder/v1/index.sqlite3     what is stored and where (index.py); about 1 KB a chunk, outside of the budget
    folder/v1/*.segment         the chunks (segment.py, serialization.py)
    folder/v1/locks, open.lock  empty, for file locks (locks.py, space.py)

A chunk is locked by those who read or pin it, and by its owner while it is written or given up; locks go with their
process. Neither the disk nor the index is trusted: a chunk that is not what was put is a miss, with one warning, and
is dropped. The folder must be on a local file system: sqlite's log needs shared memory.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from vllm_blend.kv_store.arena import Arena
from vllm_blend.kv_store.breaker import Breaker
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk_config import DiskStoreConfig
from vllm_blend.kv_store.index import Entry
from vllm_blend.kv_store.pending import PendingChunk
from vllm_blend.kv_store.quantization import NotQuantizable
from vllm_blend.kv_store.serialization import (
    PAGE,
    ChunkFault,
    ChunkHeader,
    ChunkLayout,
    aligned_empty,
    check_key,
    serialize,
)
from vllm_blend.kv_store.space import DiskSpace
from vllm_blend.kv_store.tally import Tally

logger = logging.getLogger(__name__)

VERSION = "v1"
FLUSH_USES = 64  # uses that are counted in memory before the index hears of them

T = TypeVar("T")
Allocate = Callable[[int], "torch.Tensor | None"]  # bytes -> [bytes] uint8 on the host, as Arena.allocate


class DiskChunkStore:
    """Chunks of the least frequency x recompute cost / bytes leave when the budget is reached.

    Safe to use from several threads, and the folder from several processes. `get` and `put` raise nothing that the
    disk, the database or another process brings about: they miss, or do not store, and count it (`tally`).
    """

    def __init__(self, config: DiskStoreConfig) -> None:
        """Raises OSError or sqlite3.Error where the folder cannot be used."""
        self.config, self.tally = config, Tally()
        folder = Path(config.folder) / VERSION
        self.space = DiskSpace(folder, config.budget_bytes, config.segment_bytes, config.direct, config.timeout)
        self._writes = Breaker(f"writing to {folder}", "chunks are not stored", 1, config.retry_seconds)
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(config.num_threads, "chunk-read")
        self._staging = Arena(aligned_empty(config.staging_bytes).numpy())
        self._lock = threading.Lock()
        self._uses: Counter[int] = Counter()  # id -> uses that the index has not heard of
        self._num_uses = 0
        self._pins: defaultdict[str, list[Entry]] = defaultdict(list)
        self._faulty: set[int] = set()  # ids of chunks that could not be dropped
        self._warned: set[str] = set()
        _stores.add(self)

    def __enter__(self) -> DiskChunkStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is being read, and let go of all pins. The store cannot be used any more."""
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._flush_uses()
        self.space.close()

    def __len__(self) -> int:
        return self._ask(self._usable().index.__len__, 0)

    def __contains__(self, key: str) -> bool:
        entry = self._ask(partial(self._usable().index.find, key), None)
        return entry is not None and entry.id not in self._faulty

    @property
    def num_bytes(self) -> int:
        """Bytes of segments that are taken, by chunks and by what is being written or given up."""
        return self._ask(lambda: self._usable().index.num_bytes, 0)

    @property
    def num_hits(self) -> int:
        return self.tally.num_hits

    @property
    def num_misses(self) -> int:
        return self.tally.num_misses

    @property
    def num_evicted(self) -> int:
        """Chunks that this process made leave for others."""
        return self.space.num_evicted

    def get(self, key: str, allocate: Allocate | None = None) -> ChunkKV | None:
        """A chunk in memory of its own (as `read`), or None."""
        pending = self.read(key, allocate)
        return None if pending is None else pending.wait()

    def read(self, key: str, allocate: Allocate | None = None) -> PendingChunk | None:
        """Begin to read a chunk; None where there is none. It counts as a hit when all of it has arrived."""
        return self.read_many([key], allocate)[0]

    def read_many(self, keys: Sequence[str], allocate: Allocate | None = None) -> list[PendingChunk | None]:
        """Begin to read chunks, the first layers of all of them first.

        `allocate` gives the memory that a chunk goes to; what starts on a page of 4 KiB is read to directly, unless the
        chunk has to be decoded. A chunk for which it gives None is a miss.
        """
        self._usable()
        pending: list[PendingChunk | None] = []
        try:
            for key in keys:
                pending.append(self._prepare(key, allocate))
        except BaseException:  # of `allocate`: nobody will read the others
            for prepared in pending:
                if prepared is not None:
                    prepared.give_up()
            raise
        runs = [(start, i, number) for i, p in enumerate(pending) if p for number, (start, _) in enumerate(p.runs)]
        for _, i, number in sorted(runs):
            chunk, pool = pending[i], self._pool
            assert chunk is not None and pool is not None
            pool.submit(chunk.read_run, number)
        return pending

    def put(self, key: str, chunk: ChunkKV, cost: float | None = None) -> ChunkKV:
        """Store a chunk, and return when it is on the disk. Returns `chunk`, which is not kept.

        `cost` is that of computing the chunk again, in any unit, the same for all chunks of a folder: its tokens times
        the length of what it is encoded after, its own tokens included, is a fair proxy. By default the chunk's tokens
        squared. Raises ValueError for a key, KV or cost that no store could keep.
        """
        check_key(key)
        cost = float(chunk.num_tokens**2 if cost is None else cost)
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(f"cost={cost} must be positive and finite")
        layout = ChunkLayout.of(chunk, self.config.format)
        self._usable()
        if layout.payload_bytes > self.config.budget_bytes:
            self.tally.refuse("too_large")
        elif not self._writes.allows():
            self.tally.refuse("writes_off")
        else:
            try:
                refused = self._store(key, chunk, layout, cost)
            except NotQuantizable as error:
                self._warn_once("not_quantizable", error)
                refused = "not_quantizable"
            except (OSError, sqlite3.Error) as error:
                self._writes.failed(error)
                refused = "failed"
            else:
                self._writes.succeeded()
            if refused is not None:
                self.tally.refuse(refused)
        return chunk

    def remove(self, key: str) -> None:
        """Drop a chunk; nothing happens when it is not there. Whoever reads it right now still gets it."""
        entry = self._ask(partial(self._usable().index.find, key), None)
        if entry is not None:
            self._ask(partial(self.space.drop, [entry]), None)

    def clear(self) -> None:
        """Drop all chunks."""
        self._ask(lambda: self._usable().drop(self.space.index.live()), None)

    def pin(self, key: str) -> bool:
        """Keep a chunk from being evicted, by any process, until `unpin` or the end of this process; whether it is
        there."""
        entry = self._ask(partial(self._usable().hold, key), None)
        if entry is None:
            return False
        with self._lock:
            self._pins[key].append(entry)
        return True

    def unpin(self, key: str) -> None:
        """End one `pin` that was true."""
        with self._lock:
            if not self._pins.get(key):
                raise ValueError(f"chunk {key} is not pinned")
            entry = self._pins[key].pop()
        self._usable().let_go(entry)

    def _prepare(self, key: str, allocate: Allocate | None) -> PendingChunk | None:
        try:
            entry = self.space.hold(key)
        except sqlite3.Error as error:
            self._warn_once("index", error)
            self.tally.miss("index")
            return None
        if entry is None or entry.id in self._faulty:
            if entry is not None:
                self.space.let_go(entry)
            self.tally.miss("absent")
            return None
        try:
            header = ChunkHeader.decode(entry.header, key, self.config.model)
            if header.layout.payload_bytes != entry.extent.num_bytes:
                raise ChunkFault("damaged", f"it has {entry.extent.num_bytes} bytes in the index")
        except ChunkFault as fault:
            self._release(entry, fault)
            self._report(entry, fault)
            return None
        layout = header.layout
        try:
            memory = (allocate or aligned_empty)(layout.kv_bytes)
        except BaseException:
            self.space.let_go(entry)
            raise
        if memory is None:
            self.space.let_go(entry)
            self.tally.miss("no_memory")
            return None
        payload = memory
        if layout.format != "auto" or memory.data_ptr() % PAGE:
            payload = self._stage(layout.payload_bytes)
        report, release = partial(self._report, entry), partial(self._release, entry)
        files, kv, timeout = self.space.files, layout.kv_in(memory), self.config.timeout
        return PendingChunk(header, files, entry.extent, payload, kv, timeout, report, release)

    def _stage(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            memory = self._staging.allocate(num_bytes)
        return aligned_empty(num_bytes) if memory is None else memory

    def _release(self, entry: Entry, error: Exception | None) -> None:
        """Nothing of a chunk is being read any more."""
        self.space.let_go(entry)
        if isinstance(error, ChunkFault):
            self._faulty.add(entry.id)
            try:
                self.space.drop([entry])
            except (OSError, sqlite3.Error) as failure:
                logger.debug("chunk %s stays in the index: %s", entry.key, failure)
            else:
                self._faulty.discard(entry.id)

    def _report(self, entry: Entry, error: Exception | None) -> None:
        """What became of reading a chunk."""
        if error is None:
            self.tally.hit(entry.extent.num_bytes)
            with self._lock:
                self._uses[entry.id] += 1
                self._num_uses += 1
                flush = self._num_uses % FLUSH_USES == 0
            if flush:
                self._flush_uses()
        elif isinstance(error, ChunkFault):
            self.tally.miss(error.kind)
            if self._first(str(entry.id)):
                logger.warning("stored chunk %s not used, it will be computed again: %s", entry.key, error)
        elif isinstance(error, InterruptedError):
            self.tally.miss("abandoned")
        else:
            reason = "timeout" if isinstance(error, TimeoutError) else "error"
            self.tally.miss(reason)
            self._warn_once(reason, error)

    def _store(self, key: str, chunk: ChunkKV, layout: ChunkLayout, cost: float) -> str | None:
        """None, or why the chunk is not stored."""
        index = self.space.index
        stored = index.find(key)
        if stored is None and self.config.admit_on_second_use:
            with index.transaction():
                if not index.remember(key):
                    return "first_use"
        serialized = serialize(key, self.config.model, chunk, layout)
        header = serialized.header.encode()
        if stored is not None and stored.header == header and stored.id not in self._faulty:
            with self._lock:
                self._uses[stored.id] += 1
            return "present"
        model, content = self.config.fingerprint, chunk.content
        name = (content, model) if model is not None and content is not None and content.key == key else None
        entry = self.space.reserve(key, layout.payload_bytes, header, cost, self._take_uses(), name)
        if entry is None:
            return "no_room"
        try:
            self.space.publish(entry, serialized.payload)
        except BaseException:
            self.space.discard(entry)
            raise
        self.tally.stored(layout.payload_bytes)
        return None

    def _take_uses(self) -> Counter[int]:
        with self._lock:
            uses, self._uses = self._uses, Counter()
        return uses

    def _flush_uses(self) -> None:
        try:
            with self.space.index.transaction():
                self.space.index.touch(self._take_uses())
        except sqlite3.Error as error:
            logger.debug("uses of chunks were not counted: %s", error)

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """An answer that needs the index, or `otherwise`, with a warning, where it does not answer."""
        try:
            return question()
        except (OSError, sqlite3.Error) as error:
            self._warn_once("index", error)
            return otherwise

    def _warn_once(self, kind: str, error: Exception) -> None:
        if self._first(kind):
            kind = type(error).__name__
            logger.warning("disk store %s (%s: %s): further cases are only counted", self.config.folder, kind, error)

    def _first(self, kind: str) -> bool:
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        return first

    def _usable(self) -> DiskSpace:
        if self._pool is None:
            raise RuntimeError("this disk store is closed, or was opened before a fork: open it again in this process")
        return self.space


_stores: weakref.WeakSet[DiskChunkStore] = weakref.WeakSet()
_inherited: list[DiskSpace] = []


def _after_fork() -> None:
    """A child has neither the threads nor the database connection of its parent, and must not keep its locks."""
    for store in list(_stores):
        if store._pool is not None:
            store._pool = None
            store.space.locks.close()
            _inherited.append(store.space)  # never closed: sqlite would meddle with the parent's files


os.register_at_fork(after_in_child=_after_fork)
