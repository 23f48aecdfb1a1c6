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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from vllm_blend.kv_store.arena import Arena
from vllm_blend.kv_store.breaker import Breaker
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk_config import DiskStoreConfig
from vllm_blend.kv_store.index import Entry
from vllm_blend.kv_store.pending import PendingChunk, neighbours, read_together
from vllm_blend.kv_store.quantization import NotQuantizable
from vllm_blend.kv_store.serialization import (
    PAGE,
    ChunkFault,
    ChunkHeader,
    ChunkLayout,
    StoredFormat,
    aligned_empty,
    check_key,
    serialize,
)
from vllm_blend.kv_store.space import DiskSpace, Wanted
from vllm_blend.kv_store.tally import Tally
from vllm_blend.kv_store.validation import ExpectedChunk

logger = logging.getLogger(__name__)

VERSION = "v1"
FLUSH_USES = 64  # uses that are counted in memory before the index hears of them

T = TypeVar("T")
Allocate = Callable[[int], "torch.Tensor | None"]  # bytes -> [bytes] uint8 on the host, as Arena.allocate


@dataclass(frozen=True)
class _Put:
    """A chunk that is to be stored."""

    key: str
    chunk: ChunkKV
    cost: float
    layout: ChunkLayout

    @classmethod
    def of(cls, key: str, chunk: ChunkKV, cost: float | None, stored: StoredFormat) -> _Put:
        check_key(key)
        cost = float(chunk.num_tokens**2 if cost is None else cost)
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(f"cost={cost} must be positive and finite")
        return cls(key, chunk, cost, ChunkLayout.of(chunk, stored))


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

    def get(self, key: str, allocate: Allocate | None = None, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        """Return a chunk in memory of its own (as `read`), or None."""
        pending = self.read(key, allocate, expected)
        return None if pending is None else pending.wait()

    def read(
        self, key: str, allocate: Allocate | None = None, expected: ExpectedChunk | None = None
    ) -> PendingChunk | None:
        """Begin to read a chunk; None where there is none. It counts as a hit when all of it has arrived."""
        return self.read_many([key], allocate, {} if expected is None else {key: expected})[0]

    def read_many(
        self,
        keys: Sequence[str],
        allocate: Allocate | None = None,
        expected: Mapping[str, ExpectedChunk] = MappingProxyType({}),
    ) -> list[PendingChunk | None]:
        """Begin to read chunks, the first layers of all of them first. A chunk that is not what `expected` says of its
        key is a miss.

        `allocate` gives the memory that a chunk goes to; what starts on a page of 4 KiB is read to directly, unless the
        chunk has to be decoded. A chunk for which it gives None is a miss. The same key twice gives the same object.
        """
        self._usable()
        pending: dict[str, PendingChunk | None] = {}
        try:
            held = self.space.hold(keys)
        except sqlite3.Error as error:
            self._warn_once("index", error)
            for _ in keys:
                self.tally.miss("index")
            return [None] * len(keys)
        try:
            for key in dict.fromkeys(keys):
                pending[key] = self._prepare(key, held.get(key), allocate, expected.get(key))
                held.pop(key, None)  # not earlier: the lock of a chunk that fails must end, too
        except BaseException:  # for example of `allocate`: none of the chunks will be read
            for entry in held.values():
                self.space.let_go(entry)
            for prepared in pending.values():
                if prepared is not None:
                    prepared.give_up()
            raise
        self._submit([chunk for chunk in pending.values() if chunk is not None])
        return [pending[key] for key in keys]

    def _submit(self, chunks: Sequence[PendingChunk]) -> None:
        """Have chunks read: small ones that are neighbours together, and of others the first layers of all first."""
        assert self._pool is not None
        for group in neighbours([chunk for chunk in chunks if chunk.is_small]):
            self._pool.submit(read_together, self.space.files, group)
        large = [chunk for chunk in chunks if not chunk.is_small]
        runs = [(start, at, number) for at, chunk in enumerate(large) for number, (start, _) in enumerate(chunk.runs)]
        for _, at, number in sorted(runs):
            self._pool.submit(large[at].read_run, number)

    def put(self, key: str, chunk: ChunkKV, cost: float | None = None) -> ChunkKV:
        """Store a chunk, and return when it is on the disk. Returns `chunk`, which is not kept.

        `cost` is that of computing the chunk again, in any unit, the same for all chunks of a folder: its tokens times
        the length of what it is encoded after, its own tokens included, is a fair proxy. By default the chunk's tokens
        squared. Raises ValueError for a key, KV or cost that no store could keep.
        """
        self.put_many([(key, chunk)], cost)
        return chunk

    def put_many(self, chunks: Sequence[tuple[str, ChunkKV]], cost: float | None = None) -> None:
        """As `put`, of chunks that wait for the disk together; copies of all are held meanwhile. Raises ValueError
        before anything is stored."""
        self._usable()
        puts = [_Put.of(key, chunk, cost, self.config.format) for key, chunk in chunks]
        fitting = [put for put in puts if put.layout.payload_bytes <= self.config.budget_bytes]
        for _ in range(len(puts) - len(fitting)):
            self.tally.refuse("too_large")
        if not fitting:
            return
        if not self._writes.allows():
            for _ in fitting:
                self.tally.refuse("writes_off")
            return
        try:
            self._store(fitting)
        except (OSError, sqlite3.Error) as error:
            self._writes.failed(error)
            for _ in fitting:
                self.tally.refuse("failed")
        else:
            self._writes.succeeded()

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
        entry = self._ask(partial(self._usable().hold, [key]), dict[str, Entry]()).get(key)
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

    def _prepare(
        self, key: str, entry: Entry | None, allocate: Allocate | None, expected: ExpectedChunk | None
    ) -> PendingChunk | None:
        """Return what is to be read of a chunk that is held, or None where it is a miss, which ends the lock. Where
        something is raised, the caller ends it."""
        if entry is None or entry.id in self._faulty:
            if entry is not None:
                self.space.let_go(entry)
            self.tally.miss("absent")
            return None
        try:
            header = ChunkHeader.decode(entry.header, key, self.config.model, self.config.exact)
            if header.layout.payload_bytes != entry.extent.num_bytes:
                raise ChunkFault("damaged", f"it has {entry.extent.num_bytes} bytes in the index")
            header.check(expected, entry.token_ids)
        except ChunkFault as fault:
            self._release(entry, fault)
            self._report(entry, fault)
            return None
        layout = header.layout
        memory = (allocate or aligned_empty)(layout.kv_bytes)
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

    def _store(self, puts: Sequence[_Put]) -> None:
        refused: list[str] = []
        ready: list[tuple[Wanted, torch.Tensor]] = []
        for put in puts:
            prepared = self._serialize(put)
            if isinstance(prepared, str):
                refused.append(prepared)
            else:
                ready.append(prepared)
        if ready and not self._write(ready):
            for one in ready:
                if len(ready) == 1 or not self._write([one]):
                    refused.append("no_room")
        for reason in refused:  # not earlier: where something is raised, all have failed
            self.tally.refuse(reason)

    def _serialize(self, put: _Put) -> tuple[Wanted, torch.Tensor] | str:
        """A chunk as it is written, or why it is not."""
        index, key = self.space.index, put.key
        stored = index.find(key)
        if stored is None and self.config.admit_on_second_use:
            with index.transaction():
                if not index.remember(key):
                    return "first_use"
        try:
            memory = self._stage(put.layout.payload_bytes)
            serialized = serialize(key, self.config.model, put.chunk, put.layout, memory)
        except NotQuantizable as error:
            self._warn_once("not_quantizable", error)
            return "not_quantizable"
        header = serialized.header.encode()
        if stored is not None and stored.header == header and stored.id not in self._faulty:
            with self._lock:
                self._uses[stored.id] += 1
            return "present"
        model, content = self.config.fingerprint, put.chunk.content
        name = (content, model) if model is not None and content is not None and content.key == key else None
        return Wanted(key, put.layout.payload_bytes, header, put.cost, name), serialized.payload

    def _write(self, ready: Sequence[tuple[Wanted, torch.Tensor]]) -> bool:
        """Write chunks; False where there is no room for all of them."""
        entries = self.space.reserve([want for want, _ in ready], self._take_uses())
        if entries is None:
            return False
        try:
            self.space.publish(entries, [payload for _, payload in ready])
        except BaseException:
            self.space.discard(entries)
            raise
        for want, _ in ready:
            self.tally.stored(want.num_bytes)
        return True

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
