"""Chunk KV on a disk, under a byte budget, shared by any number of processes of one machine.

    folder/v1/index.sqlite3     what is stored and where (index.py); about 1 KB a chunk, outside of the budget
    folder/v1/*.segment         the chunks (segment.py, serialization.py, layout.py)
    folder/v1/locks, open.lock  empty, for file locks (locks.py, space.py)

A chunk is locked by its readers, and by its owner while it is written or given up; locks go with their process.
Neither the disk nor the index is trusted: a chunk that is not what was put is a miss, with one warning, and is
dropped. The folder must be on a local file system: sqlite's log needs shared memory.

Reading and writing share the locks, the counts and the faults of a folder, and so this file.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk
from vllm_blend.kv_store.circuit_breaker import CircuitBreaker
from vllm_blend.kv_store.host_memory import PAGE, Arena, aligned_empty
from vllm_blend.kv_store.index_rows import Entry
from vllm_blend.kv_store.layout import ChunkFault, ChunkLayout, StoredFormat
from vllm_blend.kv_store.owners import Owner
from vllm_blend.kv_store.pending import PendingChunk, submit_reads
from vllm_blend.kv_store.quantization import NotQuantizable
from vllm_blend.kv_store.serialization import ChunkHeader, check_key, serialize
from vllm_blend.kv_store.space import DiskSpace, NewRow
from vllm_blend.kv_store.stats import StoreStats
from vllm_blend.kv_store.store_config import DiskStoreConfig
from vllm_blend.kv_store.tiers import Allocate

logger = logging.getLogger(__name__)

VERSION = "v1"
FLUSH_USES = 64  # uses that are counted in memory before the index hears of them

T = TypeVar("T")


@dataclass(frozen=True)
class _NewChunk:
    """A chunk that is to be stored."""

    key: str
    chunk: ChunkKV
    cost: float
    layout: ChunkLayout

    @classmethod
    def from_kv(cls, key: str, chunk: ChunkKV, cost: float | None, stored: StoredFormat) -> _NewChunk:
        check_key(key)
        cost = float(chunk.num_tokens**2 if cost is None else cost)
        if not (math.isfinite(cost) and cost > 0):
            raise ValueError(f"cost={cost} must be positive and finite")
        return cls(key, chunk, cost, ChunkLayout.from_kv(chunk, stored))


class DiskChunkStore:
    """Chunks of the least frequency x recompute cost / bytes leave when the budget is reached.

    Safe to use from several threads, and the folder from several processes. `get` and `put` raise nothing that the
    disk, the database or another process brings about: they miss, or do not store, and count it (`stats`).
    """

    max_bytes_at_once = 32 << 20  # of `put_many`: copies of them are held

    def __init__(self, config: DiskStoreConfig) -> None:
        """Open the store. Raises OSError or sqlite3.Error if the folder cannot be used."""
        self.config, self.stats = config, StoreStats(logger)
        folder = Path(config.folder) / VERSION
        self.space = DiskSpace(folder, config.budget_bytes, config.segment_bytes, config.direct, config.timeout)
        self._writes = CircuitBreaker(f"writing to {folder}", "chunks are not stored", 1, config.retry_seconds)
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(config.num_threads, "chunk-read")
        self._staging = Arena(aligned_empty(config.staging_bytes).numpy())
        self._lock = threading.Lock()
        self._uses: Counter[int] = Counter()  # id -> uses that the index has not heard of
        self._num_uses = 0
        self._faulty: set[int] = set()  # ids of chunks that could not be dropped
        _stores.add(self)

    def __enter__(self) -> DiskChunkStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is being read. The store cannot be used any more."""
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._flush_uses()
        self.space.close()

    def __len__(self) -> int:
        return self._query(self._usable_space().index.__len__, 0)

    def __contains__(self, key: str) -> bool:
        entry = self._query(partial(self._usable_space().index.find, key), None)
        return entry is not None and entry.id not in self._faulty

    @property
    def num_bytes(self) -> int:
        """Return the bytes of segments that are taken, by chunks and by what is being written or given up."""
        return self._query(lambda: self._usable_space().index.num_bytes, 0)

    def usage(self) -> tuple[int, int]:
        return self.num_bytes, len(self)

    def held(self) -> Mapping[str, int]:
        return self._query(self._usable_space().held, {})

    def get(self, key: str, allocate: Allocate | None = None, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        """Return a chunk in memory of its own (as `read`), or None."""
        pending = self.read(key, allocate, expected)
        return None if pending is None else pending.wait()

    def read(
        self, key: str, allocate: Allocate | None = None, expected: ExpectedChunk | None = None
    ) -> PendingChunk | None:
        """Begin to read a chunk; None if there is none. It counts as a hit when all of it has arrived."""
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
        space = self._usable_space()
        pending: dict[str, PendingChunk | None] = {}
        try:
            held = space.hold(keys)
        except sqlite3.Error as error:
            self._warn_once("index", error)
            for _ in keys:
                self.stats.count_miss("index")
            return [None] * len(keys)
        try:
            for key in dict.fromkeys(keys):
                pending[key] = self._prepare(key, held.get(key), allocate, expected.get(key))
                held.pop(key, None)  # not earlier: the lock of a chunk that fails must end, too
        except BaseException:  # for example of `allocate`: none of the chunks will be read
            for entry in held.values():
                space.release(entry)
            for prepared in pending.values():
                if prepared is not None:
                    prepared.give_up()
            raise
        assert self._pool is not None
        submit_reads(self._pool, space.files, [chunk for chunk in pending.values() if chunk is not None])
        return [pending[key] for key in keys]

    def put(self, key: str, chunk: ChunkKV, cost: float | None = None) -> ChunkKV:
        """Store a chunk, and return when it is on the disk. Returns `chunk`, which is not kept.

        `cost` is that of computing the chunk again, in any unit, the same for all chunks of a folder: its tokens times
        the length of what it is encoded after, its own tokens included, is a fair proxy. By default the chunk's tokens
        squared. Raises ValueError for a key, KV or cost that no store could keep.
        """
        self.put_many([(key, chunk)], cost)
        return chunk

    def put_many(self, chunks: Sequence[tuple[str, ChunkKV]], cost: float | None = None) -> None:
        """Store chunks as `put` does, waiting for the disk once; copies of all are held meanwhile. Raises ValueError
        before anything is stored."""
        self._usable_space()
        new = [_NewChunk.from_kv(key, chunk, cost, self.config.format) for key, chunk in chunks]
        fitting = [each for each in new if each.layout.payload_bytes <= self.config.budget_bytes]
        self.stats.count_refused("too_large", len(new) - len(fitting))
        if not fitting:
            return
        if not self._writes.allows():
            self.stats.count_refused("writes_off", len(fitting))
            return
        try:
            self._store(fitting)
        except (OSError, sqlite3.Error) as error:
            self._writes.failed(error)
            self.stats.count_refused("failed", len(fitting))
        else:
            self._writes.succeeded()

    def remove(self, key: str) -> None:
        """Drop a chunk; nothing happens when it is not there. Threads that are reading it still get it."""
        entry = self._query(partial(self._usable_space().index.find, key), None)
        if entry is not None:
            self._query(partial(self.space.drop, [entry]), None)

    def clear(self) -> None:
        """Drop all chunks."""
        self._query(lambda: self._usable_space().drop(self.space.index.live()), None)

    def _prepare(
        self, key: str, entry: Entry | None, allocate: Allocate | None, expected: ExpectedChunk | None
    ) -> PendingChunk | None:
        """Return what is to be read of a chunk that is held, or None if it is a miss, which ends the lock. When this
        raises, the caller ends it."""
        if entry is None or entry.id in self._faulty:
            if entry is not None:
                self.space.release(entry)
            self.stats.count_miss("absent")
            return None
        try:
            header = ChunkHeader.decode(entry.header, key, self.config.model, self.config.exact, self.config.signer)
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
            self.space.release(entry)
            self.stats.count_miss("no_memory")
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
        """End the lock of a chunk of which nothing is being read any more, and drop it if it is faulty."""
        self.space.release(entry)
        if isinstance(error, ChunkFault):
            self._faulty.add(entry.id)
            try:
                self.space.drop([entry])
            except (OSError, sqlite3.Error) as failure:
                logger.debug("chunk %s stays in the index: %s", entry.key, failure)
            else:
                self._faulty.discard(entry.id)

    def _report(self, entry: Entry, error: Exception | None) -> None:
        """Count the result of reading a chunk, and warn of a fault."""
        if error is None:
            self.stats.count_hit(entry.extent.num_bytes)
            with self._lock:
                self._uses[entry.id] += 1
                self._num_uses += 1
                flush = self._num_uses % FLUSH_USES == 0
            if flush:
                self._flush_uses()
        elif isinstance(error, ChunkFault):
            self.stats.count_fault(error.kind, entry.id, entry.key, error)
        elif isinstance(error, InterruptedError):
            self.stats.count_miss("abandoned")
        else:
            reason = "timeout" if isinstance(error, TimeoutError) else "error"
            self.stats.count_miss(reason)
            self._warn_once(reason, error)

    def _store(self, chunks: Sequence[_NewChunk]) -> None:
        refused: list[str] = []
        by_owner: dict[Owner, list[tuple[NewRow, torch.Tensor]]] = {}
        for chunk in chunks:
            prepared = self._serialize(chunk)
            if isinstance(prepared, str):
                refused.append(prepared)
            else:
                by_owner.setdefault(chunk.chunk.owner, []).append(prepared)
        for owner, ready in by_owner.items():
            if not self._write(ready, owner):
                for one in ready:
                    if len(ready) == 1 or not self._write([one], owner):
                        refused.append("no_room")
        for reason in refused:  # not earlier: when something is raised, all have failed
            self.stats.count_refused(reason)

    def _serialize(self, new: _NewChunk) -> tuple[NewRow, torch.Tensor] | str:
        """Return a chunk as it is written, or why it is not."""
        index, key = self.space.index, new.key
        stored = index.find(key)
        if stored is None and self.config.admit_on_second_use:
            with index.transaction():
                if not index.remember(key):
                    return "first_use"
        try:
            memory = self._stage(new.layout.payload_bytes)
            serialized = serialize(key, self.config.model, new.chunk, new.layout, memory, self.config.signer)
        except NotQuantizable as error:
            self._warn_once("not_quantizable", error)
            return "not_quantizable"
        header = serialized.header.encode()
        if stored is not None and stored.header == header and stored.id not in self._faulty:
            with self._lock:
                self._uses[stored.id] += 1
            return "present"
        model, content = self.config.fingerprint, new.chunk.content
        name = (content, model) if model is not None and content is not None and content.key == key else None
        return NewRow(key, new.layout.payload_bytes, header, new.cost, name), serialized.payload

    def _write(self, ready: Sequence[tuple[NewRow, torch.Tensor]], owner: Owner) -> bool:
        """Write chunks of an owner. Return False if there is no space for all of them."""
        entries = self.space.reserve([row for row, _ in ready], self._take_uses(), owner)
        if entries is None:
            return False
        try:
            self.space.publish(entries, [payload for _, payload in ready])
        except BaseException:
            self.space.discard(entries)
            raise
        for row, _ in ready:
            self.stats.count_stored(row.num_bytes)
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

    def _query(self, question: Callable[[], T], otherwise: T) -> T:
        """Return an answer that needs the index, or `otherwise`, with a warning, where it does not answer."""
        try:
            return question()
        except (OSError, sqlite3.Error) as error:
            self._warn_once("index", error)
            return otherwise

    def _warn_once(self, kind: str, error: Exception) -> None:
        message = "disk store %s (%s: %s): further cases are only counted"
        self.stats.warn_once(kind, message, self.config.folder, type(error).__name__, error)

    def _usable_space(self) -> DiskSpace:
        if self._pool is None:
            raise RuntimeError("this disk store is closed, or was opened before a fork: open it again in this process")
        return self.space


_stores: weakref.WeakSet[DiskChunkStore] = weakref.WeakSet()
_inherited: list[DiskSpace] = []


def _after_fork() -> None:
    """Make stores unusable in a child, which has neither the threads nor the database connection of its parent, and
    must not keep its locks."""
    for store in list(_stores):
        if store._pool is not None:
            store._pool = None
            store.space.locks.close()
            _inherited.append(store.space)  # never closed: sqlite would meddle with the parent's files


os.register_at_fork(after_in_child=_after_fork)
