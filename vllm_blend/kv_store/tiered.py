"""Chunk KV in tiers: memory over a disk over a server, each under a budget of its own.

Chunks that are put, or found in a tier, are kept in every tier above it and written to every tier below it; writing
happens later, in a thread. What no tier has is computed again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk
from vllm_blend.kv_store.host_memory import aligned_empty
from vllm_blend.kv_store.memory import MemoryChunkStore
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.kv_store.pending import Arrivals, PendingChunk, RequestedChunk, StartedReads
from vllm_blend.kv_store.stats import SharedTimer
from vllm_blend.kv_store.tiers import MEMORY, ChunkLoad, LoadObserver, ReadMany, TierStorage
from vllm_blend.kv_store.transfer import InFlight, copy_to_host
from vllm_blend.kv_store.write_behind import WriteBehind

WRITE_SECONDS = 30.0  # for what is still to be written when a store is closed
MAX_WRITE_BYTES = 256 << 20  # that wait for a tier; a quarter of the memory tier's budget where that is less


class Tier:
    """A store below the memory, what waits to be written to it, and how long it took to load from it."""

    def __init__(
        self, name: str, storage: TierStorage, max_write_bytes: int, read_many: ReadMany | None = None
    ) -> None:
        """`read_many` begins to read chunks whose layers can be had one by one."""
        self.name, self.storage, self.read_many = name, storage, read_many
        self.writer = WriteBehind(name, self._write, max_write_bytes, storage.max_bytes_at_once)
        self.timer = SharedTimer()
        self.load_seconds = 0.0  # of the medium, for hits

    def close(self, timeout: float) -> None:
        self.writer.close(timeout)
        self.storage.close()

    def _write(self, chunks: Sequence[tuple[str, ChunkKV]]) -> None:
        new = [(key, chunk) for key, chunk in chunks if key not in self.storage]
        if new:
            self.storage.put_many(new)


# Why a storage has not stored a chunk that it was given, by what `StoreStats.refused` calls it: an error of its medium
# (a full disk, a server that does not answer), or a chunk that it does not take. Others are no loss.
WRITE_FAILURES = ("failed", "writes_off", "no_room", "rejected", "unavailable")
WRITE_REFUSALS = ("too_large", "not_quantizable")


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
        """Return whether any tier has the chunk; asks them all."""
        return key in self.memory or any(tier.writer.get(key) or key in tier.storage for tier in self.below)

    def get(self, key: str, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        """Return a chunk from the first tier that has it; one that is not the expected one is a miss of that tier."""
        chunk = self.get_now(key)
        return self.load(key, expected) if chunk is None else chunk

    def get_now(self, key: str) -> ChunkKV | None:
        """Return a chunk that is in memory, or on its way down from there."""
        with self._lock:
            chunk = self.memory.get(key)
        if chunk is None:
            chunk = next((found for tier in self.below if (found := tier.writer.get(key)) is not None), None)
        return chunk

    def load(
        self,
        key: str,
        expected: ExpectedChunk | None = None,
        may_recompute: bool = False,
        arrivals: Arrivals | None = None,
        owner: Owner = ANYONE,
    ) -> ChunkKV | None:
        """Return a chunk from a tier below the memory, which keeps it from now on, in its owner's space. Takes as long
        as the tiers' own deadlines. A chunk that is not the `expected` one is a miss of its tier.

        With `may_recompute`, the observer may have the expected chunk computed again instead: None. With `arrivals`,
        which requests this chunk, a tier that can do so begins to read all that it requests, and others may use what
        has arrived.
        """
        for index, tier in enumerate(self.below):
            if arrivals is not None and tier.read_many is not None:
                started = arrivals.start(partial(self._start_reads, tier, tier.read_many, owner))
                if key in started.declined:
                    return None
                pending = started.pending.get(key)
                chunk = None if pending is None else pending.wait()
            else:
                if expected is not None and may_recompute and self.observer is not None:
                    if key not in tier.storage:
                        tier.storage.stats.count_miss("absent")
                        continue
                    if self._is_declined(tier, expected):
                        return None
                chunk = self._read(tier, key, expected, owner)
            if chunk is None:
                continue
            chunk = chunk.owned_by(owner)
            if expected is not None:  # which the tier has compared it with
                chunk = chunk.with_content(expected.chunk)
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

    def retain(self, key: str, level: int, seconds: float, owner: str = "") -> None:
        """Have a chunk leave the memory after those of lower levels, for so many seconds, within the quota of
        `owner`; no other tier changes."""
        with self._lock:
            self.memory.retain(key, level, seconds, owner)

    def pin(self, key: str) -> None:
        """Keep a chunk in memory once it is there."""
        with self._lock:
            self.memory.pin(key)

    def unpin(self, key: str) -> None:
        with self._lock:
            self.memory.unpin(key)

    def bytes_of(self, key: str) -> int:
        """Return what a chunk takes of the memory."""
        return self.memory.bytes_of(key)

    @property
    def free_bytes(self) -> int:
        with self._lock:
            return self.memory.free_bytes

    def remove(self, key: str) -> None:
        """Drop a chunk from every tier."""
        with self._lock:
            self.memory.remove(key)
        for tier in self.below:
            tier.writer.discard(key)
            tier.storage.remove(key)

    def clear(self) -> None:
        """Empty the memory. What is below stays there, as other processes may use it."""
        with self._lock:
            self.memory.clear()

    def flush(self, timeout: float = WRITE_SECONDS) -> bool:
        """Wait until everything is written to the tiers below. Return whether that took less than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        written = [tier.writer.flush(max(0.0, deadline - time.monotonic())) for tier in self.below]
        return all(written)

    def close(self, timeout: float = WRITE_SECONDS) -> None:
        """Write what waits to be written and let go of the tiers below. The memory can still be used."""
        below, self.below = self.below, ()
        for tier in below:
            tier.close(timeout)

    def gauges(self) -> Iterator[tuple[str, float]]:
        """Yield names (without the prefix that all metrics have) and values, by tier."""
        memory = self.memory
        yield f"{MEMORY}_hits", memory.num_hits
        yield f"{MEMORY}_misses", memory.num_misses
        yield f"{MEMORY}_bytes_read", memory.bytes_read
        yield f"{MEMORY}_bytes_written", memory.bytes_written
        yield f"{MEMORY}_bytes", memory.num_bytes
        yield f"{MEMORY}_chunks", len(memory)
        yield f"{MEMORY}_writes_refused", memory.num_refused
        for tier in self.below:
            stats = tier.storage.stats
            yield f"{tier.name}_hits", stats.num_hits
            yield f"{tier.name}_misses", stats.num_misses
            yield f"{tier.name}_faults", sum(count for kind, count in stats.misses.items() if kind != "absent")
            yield f"{tier.name}_bytes_read", stats.bytes_read
            yield f"{tier.name}_bytes_written", stats.bytes_written
            yield f"{tier.name}_load_seconds", tier.load_seconds
            failed = sum(stats.refused[reason] for reason in WRITE_FAILURES)
            yield f"{tier.name}_writes_dropped", tier.writer.num_dropped + tier.writer.num_failed + failed
            yield f"{tier.name}_writes_refused", sum(stats.refused[reason] for reason in WRITE_REFUSALS)
            usage = tier.storage.usage()
            if usage is not None:
                yield f"{tier.name}_bytes", usage[0]
                yield f"{tier.name}_chunks", usage[1]

    def held(self) -> Iterator[tuple[str, str, int]]:
        """Yield what owners hold, as tier, owner's name and bytes, as far as tiers know owners."""
        with self._lock:
            held = dict(self.memory.held)
        yield from ((MEMORY, name, num_bytes) for name, num_bytes in held.items())
        for tier in self.below:
            yield from ((tier.name, name, num_bytes) for name, num_bytes in tier.storage.held().items())

    def _is_declined(self, tier: Tier, expected: ExpectedChunk) -> bool:
        """Return whether to compute a chunk although a tier has it."""
        load = ChunkLoad(tier.name, expected.num_bytes, len(expected.chunk.token_ids))
        return self.observer is not None and self.observer.recompute(load)

    def _read(self, tier: Tier, key: str, expected: ExpectedChunk | None, owner: Owner) -> ChunkKV | None:
        start = tier.timer.start()
        try:
            chunk = tier.storage.get(key, partial(self._allocate, owner), expected)
        finally:
            seconds = tier.timer.stop(start)
        if chunk is not None:
            self._observe(tier, chunk, seconds)
        return chunk

    def _start_reads(
        self, tier: Tier, read_many: ReadMany, owner: Owner, requested: Mapping[str, RequestedChunk]
    ) -> StartedReads:
        """Begin to read what a tier has of the requested chunks."""
        declined = frozenset(
            key
            for key, chunk in requested.items()
            if chunk.may_recompute and self.observer is not None and key in tier.storage
            if self._is_declined(tier, chunk.expected)
        )
        keys = [key for key in requested if key not in declined]
        found = read_many(keys, partial(self._allocate, owner), {key: requested[key].expected for key in keys})
        pending = {key: chunk for key, chunk in zip(keys, found, strict=True) if chunk is not None}
        for chunk in pending.values():
            chunk.watch(done=partial(self._stop_timer, tier, chunk, tier.timer.start()))
        return StartedReads(pending, declined)

    def _stop_timer(self, tier: Tier, pending: PendingChunk, start: float) -> None:
        seconds = tier.timer.stop(start)
        if pending.is_whole:
            self._observe(tier, pending.kv, seconds)

    def _observe(self, tier: Tier, chunk: ChunkKV, seconds: float) -> None:
        with self._lock:
            tier.load_seconds += seconds
        if self.observer is not None:
            self.observer.loaded(ChunkLoad(tier.name, chunk.nbytes, chunk.num_tokens), seconds)

    def _allocate(self, owner: Owner, num_bytes: int) -> torch.Tensor | None:
        with self._lock:
            memory = self.memory.allocate(num_bytes, owner)
        return aligned_empty(num_bytes) if memory is None else memory

    def _keep(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Move a chunk that was loaded to where the memory tier keeps its chunks."""
        device = self.memory.device
        if device is not None and chunk.k.device != device:
            k, v = chunk.k.to(device), chunk.v.to(device)  # not under the lock: this takes a while
            chunk = chunk.moved(k, v)
        elif not self.memory.is_in_place(chunk):
            with self._lock:
                memory = self.memory.allocate(chunk.nbytes, chunk.owner)
            if memory is not None:
                chunk = copy_to_host(chunk, memory, self._no_copies)
        with self._lock:
            return self.memory.adopt(key, chunk)
