"""Chunk KV in memory under a byte budget: on one device, or in a pinned arena that a GPU copies from by itself."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from vllm_blend.checks import positive
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.host_memory import Arena, piece_bytes, pinned_buffer
from vllm_blend.kv_store.transfer import InFlight, copy_to_host

logger = logging.getLogger(__name__)


@dataclass
class _StoredChunk:
    chunk: ChunkKV
    num_bytes: int  # of the budget
    num_uses: int = 0
    last_use: int = 0  # number of the last use in the store
    priority: float = 0.0

    @property
    def cost_per_byte(self) -> float:
        """Return what computing the chunk again costs, which is taken to be its tokens squared, by its bytes."""
        return self.chunk.num_tokens**2 / self.num_bytes


OWNER_QUOTA, QUOTA = 0.5, 0.75


class MemoryChunkStore:
    """Chunks of the least priority leave first when the budget is reached. A chunk larger than the budget is not kept,
    nor is one for which only pinned chunks would have to leave.

    A priority is uses x recompute cost / bytes, plus a clock (GreedyDual-Size-Frequency; Cherkasova, HP Labs 1998): the
    priority of the last chunk that left, added when a chunk arrives or is used. Without it, what was once popular would
    never leave. Of equal chunks, the least recently used one leaves. Chunks that are retained leave after all others,
    those of the lowest level first, for as long as was asked for. Those beyond the quota of their owner, or of all
    owners together, are as any other: what one owner retains does not end reuse for others.

    Chunks are kept on `device`, or where they are (None). The tensors are never written to: code that places a chunk
    copies it into pages of its own.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: torch.device | None = None,
        now: Callable[[], float] = time.monotonic,
        quotas: tuple[float, float] = (OWNER_QUOTA, QUOTA),
    ) -> None:
        """`quotas`: parts of the budget that retained chunks of one owner, and of all, may take as such."""
        positive("budget_bytes", budget_bytes)
        self.budget_bytes, self.device = budget_bytes, device
        self._owner_quota, self._quota = (part * budget_bytes for part in quotas)
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.bytes_read = 0  # of chunks that were handed out
        self.bytes_written = 0  # of chunks that were kept
        self._chunks: dict[str, _StoredChunk] = {}
        self._pins: Counter[str] = Counter()
        self._clock = 0.0
        self._use_numbers = count()
        # A heap of level, priority, last_use and key; also outdated entries.
        self._by_priority: list[tuple[int, float, int, str]] = []
        self._now = now
        self._retained: dict[str, tuple[int, float, str]] = {}  # key -> level, until when, and for whom
        self._counted: dict[str, int] = {}  # the bytes of those that are there and within the quotas
        self._counted_bytes: Counter[str] = Counter()  # the sums by owner
        self._expiries: list[tuple[float, str]] = []  # a heap: until, key; also outdated entries

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def get(self, key: str) -> ChunkKV | None:
        stored = self._chunks.get(key)
        if stored is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self.bytes_read += stored.chunk.nbytes
        self._use(key, stored)
        return stored.chunk

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk under `key`. Returns the chunk to go on with: the one that is kept, where it is kept."""
        self.remove(key)
        num_bytes = self._bytes_taken(chunk)
        if num_bytes > self.budget_bytes:
            return chunk
        while self.num_bytes + num_bytes > self.budget_bytes:
            if not self._evict():
                return chunk
        if self.device is not None:
            chunk = chunk.moved(chunk.k.to(self.device), chunk.v.to(self.device))
        self._keep(key, chunk)
        return chunk

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return memory for a chunk that is about to be read for `adopt`: [num_bytes] uint8, page-aligned, for which
        chunks that are kept may have to leave. None if any memory will do."""
        return None

    def is_in_place(self, chunk: ChunkKV) -> bool:
        """Return whether a chunk lies where this store keeps its own."""
        return True if self.device is None else chunk.k.device == self.device

    def adopt(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk as `put` does, but without copying: it `is_in_place`, or there was no memory for it."""
        return self.put(key, chunk)

    def remove(self, key: str) -> None:
        """Drop a chunk; nothing happens when it is not there."""
        stored = self._chunks.pop(key, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            self._uncount(key)

    def pin(self, key: str) -> None:
        """Do not evict what is stored under `key`, now or later, until it is unpinned as often."""
        self._pins[key] += 1

    def unpin(self, key: str) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]

    def retain(self, key: str, level: int, seconds: float, owner: str = "") -> None:
        """Have what is stored under `key`, now or later, leave after all chunks of a lower level for so many seconds,
        as far as the quota of `owner` goes. A level of 0 is that of chunks that are not retained."""
        self._uncount(key)
        self._retained.pop(key, None)
        if level > 0 and seconds > 0:
            until = self._now() + seconds
            self._retained[key] = level, until, owner
            self._count(key)
            heapq.heappush(self._expiries, (until, key))
            if len(self._expiries) > 4 * len(self._retained) + 64:
                self._expiries = [(until, key) for key, (_, until, _) in self._retained.items()]
                heapq.heapify(self._expiries)
        self._queue(key)

    def bytes_of(self, key: str) -> int:
        """Return what a chunk takes of the budget, 0 where it is not there. This does not count as a use."""
        stored = self._chunks.get(key)
        return 0 if stored is None else stored.num_bytes

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the budget that are not pinned: what a chunk may take at most."""
        return self.budget_bytes - sum(self.bytes_of(key) for key in self._pins)

    def clear(self) -> None:
        self._chunks.clear()
        self._by_priority.clear()
        self._retained.clear()
        self._counted.clear()
        self._counted_bytes.clear()
        self._expiries.clear()
        self.num_bytes = 0

    def _keep(self, key: str, chunk: ChunkKV) -> None:
        stored = self._chunks[key] = _StoredChunk(chunk, self._bytes_taken(chunk))
        self.num_bytes += stored.num_bytes
        self.bytes_written += chunk.nbytes
        self._count(key)
        self._use(key, stored)

    def _use(self, key: str, stored: _StoredChunk) -> None:
        stored.num_uses += 1
        stored.last_use = next(self._use_numbers)
        stored.priority = self._clock + stored.num_uses * stored.cost_per_byte
        self._queue(key)

    def _queue(self, key: str) -> None:
        """Put a chunk into the heap as it is now."""
        stored = self._chunks.get(key)
        if stored is None:
            return
        heapq.heappush(self._by_priority, (self._level(key), stored.priority, stored.last_use, key))
        if len(self._by_priority) > 4 * len(self._chunks) + 64:
            self._by_priority = [entry for entry in self._by_priority if self._is_current(*entry)]
            heapq.heapify(self._by_priority)

    def _level(self, key: str) -> int:
        return self._retained[key][0] if key in self._counted else 0

    def _count(self, key: str) -> None:
        """Count a chunk that is there and retained, if the quotas allow that."""
        num_bytes = self.bytes_of(key)
        if key not in self._retained or not num_bytes:
            return
        owner = self._retained[key][2]
        fits_owner = self._counted_bytes[owner] + num_bytes <= self._owner_quota
        if fits_owner and self._counted_bytes.total() + num_bytes <= self._quota:
            self._counted[key] = num_bytes
            self._counted_bytes[owner] += num_bytes

    def _uncount(self, key: str) -> None:
        num_bytes = self._counted.pop(key, 0)
        if num_bytes:
            owner = self._retained[key][2]
            self._counted_bytes[owner] -= num_bytes
            if not self._counted_bytes[owner]:
                del self._counted_bytes[owner]

    def _is_current(self, level: int, priority: float, last_use: int, key: str) -> bool:
        return key in self._chunks and self._chunks[key].last_use == last_use and self._level(key) == level

    def _end_retention(self) -> None:
        """Let go of what need not be retained any longer."""
        while self._expiries and self._expiries[0][0] <= self._now():
            until, key = heapq.heappop(self._expiries)
            if self._retained.get(key, (0, 0.0, ""))[1] == until:
                self._uncount(key)
                del self._retained[key]
                self._queue(key)

    def _evict(self) -> bool:
        """Drop the chunk of the least priority that is not pinned. Return False if there is none."""
        self._end_retention()
        pinned, found = [], False
        while self._by_priority and not found:
            entry = level, priority, _, key = heapq.heappop(self._by_priority)
            if not self._is_current(*entry):
                continue
            if key in self._pins:
                pinned.append(entry)
                continue
            if level == 0:
                self._clock = max(self._clock, priority)
            found = True
            self.remove(key)
        for entry in pinned:
            heapq.heappush(self._by_priority, entry)
        return found

    def _bytes_taken(self, chunk: ChunkKV) -> int:
        return chunk.nbytes


class PinnedChunkStore(MemoryChunkStore):
    """Chunks in an arena of pinned host memory, which is all that the store ever takes.

    `put` copies: from a GPU in the background, so that the chunk is there when `ChunkKV.written` is. A chunk that was
    evicted keeps its piece of the arena for as long as requests, or copies in flight, hold it.
    """

    def __init__(self, arena: Arena, in_flight: InFlight) -> None:
        super().__init__(arena.num_bytes)
        self.arena, self.in_flight = arena, in_flight
        self.num_unpinned = 0  # chunks for which the arena had no memory

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Keep a copy of a chunk in the arena. A chunk for which nothing can be evicted is not kept, and comes back in
        ordinary host memory: what is needed now works, and loads slowly."""
        self.remove(key)
        memory = self._allocate(chunk.nbytes)
        if memory is None:
            if self.num_unpinned == 0:
                logger.warning(
                    "the chunks that running requests hold fill the %.2f GiB of pinned memory: others load slowly; "
                    "raise blend_chunk_cache_gib",
                    self.budget_bytes / 2**30,
                )
            self.num_unpinned += 1
            unpinned = copy_to_host(chunk, torch.empty(chunk.nbytes, dtype=torch.uint8), self.in_flight)
            unpinned.wait()
            return unpinned
        chunk = copy_to_host(chunk, memory, self.in_flight)
        self._keep(key, chunk)
        return chunk

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Return a piece of the arena as the base class says; None if running requests hold too much.

        For one thread at a time: unlike `put`, this does not look at copies in flight, which are the engine's.
        """
        if piece_bytes(num_bytes) > self.budget_bytes:
            return None
        memory = self.arena.allocate(num_bytes)
        while memory is None and self._evict():
            memory = self.arena.allocate(num_bytes)
        return memory

    def is_in_place(self, chunk: ChunkKV) -> bool:
        return self.arena.contains(chunk.k)

    def adopt(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk that lies in the arena. One for which the arena had no memory is not kept: it loads slowly, and
        is counted."""
        self.remove(key)
        if self.is_in_place(chunk):
            self._keep(key, chunk)
        else:
            self.num_unpinned += 1
        return chunk

    def _allocate(self, num_bytes: int) -> torch.Tensor | None:
        self.in_flight.release()
        memory = self.allocate(num_bytes)
        if memory is None and piece_bytes(num_bytes) <= self.budget_bytes and self.in_flight.wait():
            memory = self.arena.allocate(num_bytes)
        return memory

    def _bytes_taken(self, chunk: ChunkKV) -> int:
        return piece_bytes(chunk.k.untyped_storage().nbytes())  # K and V share a piece


def make_chunk_store(
    budget_bytes: int, chunk_device: torch.device, engine_device: torch.device, in_flight: InFlight
) -> MemoryChunkStore:
    """Return the store of an engine whose chunks live on `chunk_device`; `in_flight` holds the chunks that it loads.

    Raises ValueError if the host has too little memory to pin.
    """
    if chunk_device.type == "cpu" and engine_device.type == "cuda":
        return PinnedChunkStore(Arena(pinned_buffer(budget_bytes, "blend_chunk_cache_gib")), in_flight)
    return MemoryChunkStore(budget_bytes, chunk_device)
