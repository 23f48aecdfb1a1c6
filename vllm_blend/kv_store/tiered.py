"""Chunk KV in tiers: memory over a disk over a server, each under a budget of its own.

Chunks that are put, or found in a tier, are kept in every tier above it and written to every tier below it; writing
happens later, in a thread. What no tier has is computed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from vllm_blend.kv_store.arrivals import Arrivals, Begun, WantedChunk
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.cpu import MemoryChunkStore
from vllm_blend.kv_store.meter import Meter
from vllm_blend.kv_store.pending import PendingChunk
from vllm_blend.kv_store.serialization import aligned_empty
from vllm_blend.kv_store.tally import Tally
from vllm_blend.kv_store.transfer import InFlight, copy_to_host
from vllm_blend.kv_store.validation import ExpectedChunk, find_kv_mismatch
from vllm_blend.kv_store.write_behind import WriteBehind

logger = logging.getLogger(__name__)

MEMORY, DISK, REMOTE = "memory", "disk", "remote"  # names of tiers
WRITE_SECONDS = 30.0  # for what is still to be written when a store is closed
MAX_TOGETHER_BYTES = 32 << 20  # that are written at once: copies of them are held
MAX_WRITE_BYTES = 256 << 20  # that wait for a tier; a quarter of the memory tier's budget where that is less

Allocate = Callable[[int], "torch.Tensor | None"]


class ChunkStorage(Protocol):
    """What a tier below the memory can do, from any thread. It raises nothing that its medium brings about: it misses,
    or does not store, and counts it."""

    tally: Tally

    def __contains__(self, key: str) -> bool: ...

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV: ...

    def remove(self, key: str) -> None: ...


@dataclass(frozen=True)
class Choice:
    """A chunk that a tier has, and that may be loaded from there or computed again."""

    tier: str
    num_bytes: int
    num_tokens: int


DescribeChunk = Callable[[str], Choice]  # given the name of a tier
# Both as those of DiskChunkStore.
Read = Callable[[str, Allocate, "ExpectedChunk | None"], "ChunkKV | None"]
ReadMany = Callable[[Sequence[str], Allocate, Mapping[str, ExpectedChunk]], "list[PendingChunk | None]"]


class LoadObserver(Protocol):
    """Whoever wants to know how fast chunks load, and to have a say in it. Called from several threads."""

    def loaded(self, what: Choice, seconds: float) -> None: ...

    def recompute(self, what: Choice) -> bool: ...


class Tier:
    """A store below the memory: how to read from it, what waits to be written to it, and what became of lookups."""

    def __init__(
        self,
        name: str,
        storage: ChunkStorage,
        read: Read,
        max_write_bytes: int,
        usage: Callable[[], tuple[int, int]] | None = None,
        close: Callable[[], None] | None = None,
        begin: ReadMany | None = None,
        write_many: Callable[[Sequence[tuple[str, ChunkKV]]], None] | None = None,
    ) -> None:
        """`usage` gives the bytes and the chunks that are stored, where that is known. `begin` begins to read chunks
        whose layers can be had one by one, and `write_many` writes several at once."""
        self.name, self.storage, self.read, self.usage = name, storage, read, usage
        self.begin, self.write_many = begin, write_many
        together = 0 if write_many is None else MAX_TOGETHER_BYTES
        self.writer = WriteBehind(name, self._write, max_write_bytes, together)
        self.meter = Meter()
        self.load_seconds = 0.0  # of the medium, for hits
        self._close = close

    def close(self, timeout: float) -> None:
        self.writer.close(timeout)
        if self._close is not None:
            self._close()

    def _write(self, chunks: Sequence[tuple[str, ChunkKV]]) -> None:
        new = [(key, chunk) for key, chunk in chunks if key not in self.storage]
        if self.write_many is not None and new:
            self.write_many(new)
        else:
            for key, chunk in new:
                self.storage.put(key, chunk)


class TieredChunkStore:
    """Safe to use from several threads. `get_now` and `put` never wait for a tier below the memory; the others do.

    Number of chunks and bytes are the memory's, as with a store that has no other tier.
    """

    def __init__(self, memory: MemoryChunkStore, below: Sequence[Tier], observer: LoadObserver | None = None) -> None:
        self.memory, self.below, self.observer = memory, tuple(below), observer
        self._lock = threading.RLock()
        self._no_copies = InFlight()  # of a GPU: chunks that are loaded come from the host

    @property
    def budget_bytes(self) -> int:
        return self.memory.budget_bytes

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def __len__(self) -> int:
        return len(self.memory)

    def __contains__(self, key: str) -> bool:
        """Whether any tier has the chunk; asks them all."""
        return key in self.memory or any(tier.writer.get(key) or key in tier.storage for tier in self.below)

    def get(self, key: str, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        """Return a chunk from the first tier that has it; one that is not the expected one is a miss of that tier."""
        chunk = self.get_now(key)
        return self.load(key, expected=expected) if chunk is None else chunk

    def get_now(self, key: str) -> ChunkKV | None:
        """A chunk that is in memory, or on its way down from there."""
        with self._lock:
            chunk = self.memory.get(key)
        if chunk is None:
            chunk = next((found for tier in self.below if (found := tier.writer.get(key)) is not None), None)
        return chunk

    def load(
        self,
        key: str,
        describe: DescribeChunk | None = None,
        arrivals: Arrivals | None = None,
        expected: ExpectedChunk | None = None,
    ) -> ChunkKV | None:
        """A chunk from a tier below the memory, which keeps it from now on. Takes as long as the tiers' own deadlines.

        With `describe`, the observer may have the chunk computed again instead: None. With `arrivals`, which wants this
        chunk, a tier that can do so begins to read all that it wants, and others may use what has arrived. A chunk that
        is not the `expected` one is a miss of its tier.
        """
        for index, tier in enumerate(self.below):
            if arrivals is not None and tier.begin is not None:
                begun = arrivals.begin(partial(self._begin, tier, tier.begin))
                if key in begun.declined:
                    return None
                pending = begun.pending.get(key)
                chunk = None if pending is None else pending.wait()
            elif describe is not None and self.observer is not None and key not in tier.storage:
                tier.storage.tally.miss("absent")
                continue
            elif self._declines(tier, describe):
                return None
            else:
                chunk = self._read(tier, key, expected)
            if chunk is not None and expected is not None:
                chunk = self._checked(tier, chunk, expected)
            if chunk is None:
                continue
            chunk = self._keep(key, chunk)
            for faster in self.below[:index]:
                faster.writer.put(key, chunk)
            return replace(chunk, loaded_from=tier.name)
        return None

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk in memory, and have it written to the tiers below. Returns the chunk to go on with."""
        with self._lock:
            chunk = self.memory.put(key, chunk)
        for tier in self.below:
            tier.writer.put(key, chunk)
        return chunk

    def pin(self, key: str) -> None:
        """Keep a chunk in memory once it is there."""
        with self._lock:
            self.memory.pin(key)

    def unpin(self, key: str) -> None:
        with self._lock:
            self.memory.unpin(key)

    def bytes_of(self, key: str) -> int:
        """What a chunk takes of the memory."""
        return self.memory.bytes_of(key)

    @property
    def room(self) -> int:
        with self._lock:
            return self.memory.room

    def remove(self, key: str) -> None:
        """Drop a chunk from every tier."""
        with self._lock:
            self.memory.remove(key)
        for tier in self.below:
            tier.writer.discard(key)
            tier.storage.remove(key)

    def clear(self) -> None:
        """Empty the memory. What is below stays there, for whoever else uses it."""
        with self._lock:
            self.memory.clear()

    def flush(self, timeout: float = WRITE_SECONDS) -> bool:
        """Wait until everything is written to the tiers below; whether that took less than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        written = [tier.writer.flush(max(0.0, deadline - time.monotonic())) for tier in self.below]
        return all(written)

    def close(self, timeout: float = WRITE_SECONDS) -> None:
        """Write what waits to be written and let go of the tiers below. The memory can still be used."""
        below, self.below = self.below, ()
        for tier in below:
            tier.close(timeout)

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Names (without what all metrics begin with) and values, by tier."""
        memory = self.memory
        yield f"{MEMORY}_hits", memory.num_hits
        yield f"{MEMORY}_misses", memory.num_misses
        yield f"{MEMORY}_bytes", memory.num_bytes
        yield f"{MEMORY}_chunks", len(memory)
        for tier in self.below:
            tally = tier.storage.tally
            yield f"{tier.name}_hits", tally.num_hits
            yield f"{tier.name}_misses", tally.num_misses
            yield f"{tier.name}_faults", sum(count for kind, count in tally.misses.items() if kind != "absent")
            yield f"{tier.name}_bytes_read", tally.bytes_read
            yield f"{tier.name}_bytes_written", tally.bytes_written
            yield f"{tier.name}_load_seconds", tier.load_seconds
            yield f"{tier.name}_writes_dropped", tier.writer.num_dropped + tier.writer.num_failed
            if tier.usage is not None:
                num_bytes, num_chunks = tier.usage()
                yield f"{tier.name}_bytes", num_bytes
                yield f"{tier.name}_chunks", num_chunks

    def _declines(self, tier: Tier, describe: DescribeChunk | None) -> bool:
        """Whether to compute a chunk that a tier has."""
        return describe is not None and self.observer is not None and self.observer.recompute(describe(tier.name))

    def _checked(self, tier: Tier, chunk: ChunkKV, expected: ExpectedChunk) -> ChunkKV | None:
        """Return a chunk that a tier gave, with its content; None, and the tier drops it, where it is another one."""
        mismatch = find_kv_mismatch(expected, chunk)
        if mismatch is None:
            return chunk.of(expected.chunk)
        key = expected.chunk.key
        logger.warning("stored chunk %s not used, it will be computed again: %s", key, mismatch)
        tier.storage.tally.miss("foreign")
        tier.storage.remove(key)
        return None

    def _read(self, tier: Tier, key: str, expected: ExpectedChunk | None) -> ChunkKV | None:
        with tier.meter.measure() as share:
            chunk = tier.read(key, self._allocate, expected)
        if chunk is not None:
            self._observe(tier, chunk, share.seconds)
        return chunk

    def _begin(self, tier: Tier, begin: ReadMany, wanted: Mapping[str, WantedChunk]) -> Begun:
        """Begin to read what a tier has of `wanted`."""
        declined = frozenset(
            key
            for key, chunk in wanted.items()
            if chunk.describe is not None and self.observer is not None and key in tier.storage
            if self._declines(tier, chunk.describe)
        )
        keys = [key for key in wanted if key not in declined]
        expected = {key: wanted[key].expected for key in keys}
        found = zip(keys, begin(keys, self._allocate, expected), strict=True)
        pending = {key: one for key, one in found if one is not None}
        for one in pending.values():
            one.watch(done=partial(self._stopped, tier, one, tier.meter.start()))
        return Begun(pending, declined)

    def _stopped(self, tier: Tier, pending: PendingChunk, start: float) -> None:
        seconds = tier.meter.stop(start)
        if pending.is_whole:
            self._observe(tier, pending.kv, seconds)

    def _observe(self, tier: Tier, chunk: ChunkKV, seconds: float) -> None:
        with self._lock:
            tier.load_seconds += seconds
        if self.observer is not None:
            self.observer.loaded(Choice(tier.name, chunk.nbytes, chunk.num_tokens), seconds)

    def _allocate(self, num_bytes: int) -> torch.Tensor | None:
        with self._lock:
            memory = self.memory.allocate(num_bytes)
        return aligned_empty(num_bytes) if memory is None else memory

    def _keep(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Move a chunk that was loaded to where the memory tier keeps its chunks."""
        device = self.memory.device
        if device is not None and chunk.k.device != device:
            k, v = chunk.k.to(device), chunk.v.to(device)  # not under the lock: this takes a while
            chunk = chunk.moved(k, v)
        elif not self.memory.holds(chunk):
            with self._lock:
                memory = self.memory.allocate(chunk.nbytes)
            if memory is not None:
                chunk = copy_to_host(chunk, memory, self._no_copies)
        with self._lock:
            return self.memory.adopt(key, chunk)
