"""Chunk KV in memory under a byte budget."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from vllm_blend.checks import positive
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.owners import ANYONE, LeastFirst, Owner, Place, above_their_parts, parts


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
ACTIVE_SECONDS = 600.0  # for which an owner that uses nothing keeps its part


class MemoryChunkStore:
    """Chunks of the least priority leave first when the budget is reached. A chunk larger than the budget is not kept,
    nor is one for which only pinned chunks would have to leave.

    A priority is uses x recompute cost / bytes, plus a clock (GreedyDual-Size-Frequency; Cherkasova, HP Labs 1998): the
    priority of the last chunk that left, added when a chunk arrives or is used. Without it, what was once popular would
    never leave. Of equal chunks, the least recently used one leaves. Chunks that are retained leave after all others,
    those of the lowest level first, for as long as was asked for. Those beyond the quota of their owner, or of all
    owners together, are as any other: what one owner retains does not end reuse for others. Neither does what it
    stores: owners have parts of the budget (owners.py), and retained chunks are no exception.

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
        self.num_refused = 0  # chunks that were not kept
        self.held: Counter[str] = Counter()  # bytes by the owner's name
        self._owners: dict[str, Owner] = {}  # those that hold something, as they were last seen
        self._last_uses: dict[str, float] = {}  # when each of them used something last
        self._chunks: dict[str, _StoredChunk] = {}
        self._pins: Counter[str] = Counter()
        self._clock = 0.0
        self._use_numbers = count()
        self._order = LeastFirst(self._is_current)
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
        if not self._make_room(chunk.owner, num_bytes, lambda: self.num_bytes + num_bytes <= self.budget_bytes):
            self.num_refused += 1
            return chunk
        if self.device is not None:
            chunk = chunk.moved(chunk.k.to(self.device), chunk.v.to(self.device))
        self._keep(key, chunk)
        return chunk

    def allocate(self, num_bytes: int, owner: Owner = ANYONE) -> torch.Tensor | None:
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
            self._uncount(key)
            owner = stored.chunk.owner.name
            self.num_bytes -= stored.num_bytes
            self.held[owner] -= stored.num_bytes
            if not self.held[owner]:
                del self.held[owner], self._owners[owner], self._last_uses[owner]
                self._order.forget(owner)

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
        self._order.clear()
        self.held.clear()
        self._owners.clear()
        self._last_uses.clear()
        self._retained.clear()
        self._counted.clear()
        self._counted_bytes.clear()
        self._expiries.clear()
        self.num_bytes = 0

    def _keep(self, key: str, chunk: ChunkKV) -> None:
        stored = self._chunks[key] = _StoredChunk(chunk, self._bytes_taken(chunk))
        self.num_bytes += stored.num_bytes
        self.held[chunk.owner.name] += stored.num_bytes
        self._owners[chunk.owner.name] = chunk.owner
        self.bytes_written += chunk.nbytes
        self._count(key)
        self._use(key, stored)

    def _use(self, key: str, stored: _StoredChunk) -> None:
        stored.num_uses += 1
        stored.last_use = next(self._use_numbers)
        stored.priority = self._clock + stored.num_uses * stored.cost_per_byte
        self._last_uses[stored.chunk.owner.name] = self._now()
        self._queue(key)

    def _queue(self, key: str) -> None:
        """Note when a chunk will leave, as it is now."""
        stored = self._chunks.get(key)
        if stored is not None:
            place = Place(self._level(key), stored.priority, stored.last_use, key)
            self._order.add(stored.chunk.owner.name, place)

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

    def _is_current(self, place: Place) -> bool:
        stored = self._chunks.get(place.key)
        return stored is not None and stored.last_use == place.last_use and self._level(place.key) == place.level

    def _end_retention(self) -> None:
        """Let go of what need not be retained any longer."""
        while self._expiries and self._expiries[0][0] <= self._now():
            until, key = heapq.heappop(self._expiries)
            if self._retained.get(key, (0, 0.0, ""))[1] == until:
                self._uncount(key)
                del self._retained[key]
                self._queue(key)

    def _make_room(self, owner: Owner, num_bytes: int, is_done: Callable[[], bool]) -> bool:
        """Evict until a chunk of an owner fits. Return False if that cannot be: others keep their parts, and an owner
        its limit."""
        limit = self.budget_bytes if owner.max_bytes is None else min(owner.max_bytes, self.budget_bytes)
        if num_bytes > limit:
            return False
        self._end_retention()
        while self.held[owner.name] + num_bytes > limit:
            if not self._evict_first([owner.name]):
                return False
        while not is_done():
            own = owner.name
            shares = parts(self.budget_bytes, {**self._active(), own: owner})
            above = above_their_parts(self.held, shares, own, num_bytes)
            if above in ([], [own]) and self.num_bytes - self.held[own] + num_bytes > self.budget_bytes:
                return False  # all that others have is theirs
            if not (self._evict_first(above) or self._evict_first([own])):
                return False
        return True

    def _active(self) -> dict[str, Owner]:
        """Return the owners that have a part: those that use what they have here, or have retained some of it."""
        since = self._now() - ACTIVE_SECONDS
        return {
            name: owner
            for name, owner in self._owners.items()
            if self._last_uses[name] > since or self._counted_bytes[name]
        }

    def _evict_first(self, owners: Sequence[str]) -> bool:
        """Drop the chunk that leaves first of all that these owners have. Return False if there is none."""
        places = [self._order.least(name, self._pins.__contains__) for name in owners]
        place = min((each for each in places if each is not None), default=None)
        if place is None:
            return False
        if place.level == 0:
            self._clock = max(self._clock, place.priority)
        self.remove(place.key)
        return True

    def _bytes_taken(self, chunk: ChunkKV) -> int:
        return chunk.nbytes
