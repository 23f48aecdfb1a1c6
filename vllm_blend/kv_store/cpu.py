"""Chunk KV in memory under a byte budget: on one device, or in a pinned arena that a GPU copies from by itself."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from vllm_blend.kv_store.arena import Arena, piece_bytes
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.pinned import pinned_buffer
from vllm_blend.kv_store.transfer import InFlight, copy_to_host
from vllm_blend.kv_store.worth import Worth

logger = logging.getLogger(__name__)


class MemoryChunkStore:
    """Chunks that are worth least leave first when the budget is reached (worth.py; what computing one again costs is
    taken to be its tokens squared). A chunk larger than the budget is not kept, nor is one for which only pinned chunks
    would have to leave.

    Chunks are kept on `device`, or where they are (None). The tensors are never written to: whoever places a chunk
    copies it into pages of its own.
    """

    def __init__(self, budget_bytes: int, device: torch.device | None = None) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes={budget_bytes} must be positive")
        self.budget_bytes, self.device = budget_bytes, device
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._chunks: dict[str, ChunkKV] = {}
        self._worth = Worth()
        self._pins: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def get(self, key: str) -> ChunkKV | None:
        chunk = self._chunks.get(key)
        if chunk is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._worth.use(key)
        return chunk

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Keep a chunk under `key`. Returns the chunk to go on with: the one that is kept, where it is kept."""
        self.remove(key)
        if self._size(chunk) > self.budget_bytes:
            return chunk
        while self.num_bytes + self._size(chunk) > self.budget_bytes:
            if not self._evict():
                return chunk
        if self.device is not None:
            chunk = chunk.moved(chunk.k.to(self.device), chunk.v.to(self.device))
        self._keep(key, chunk)
        return chunk

    def allocate(self, num_bytes: int) -> torch.Tensor | None:
        """Memory for a chunk that is about to be read for `adopt`: [num_bytes] uint8, page-aligned, at the cost of
        chunks that are kept. None where any memory will do."""
        return None

    def holds(self, chunk: ChunkKV) -> bool:
        """Whether a chunk lies where this store keeps its own."""
        return True if self.device is None else chunk.k.device == self.device

    def adopt(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """As `put`, of a chunk that this store `holds`, or that it has no room for."""
        return self.put(key, chunk)

    def remove(self, key: str) -> None:
        """Drop a chunk; nothing happens when it is not there."""
        if key in self._chunks:
            self._worth.remove(key)
            self._drop(key)

    def pin(self, key: str) -> None:
        """Do not evict what is stored under `key`, now or later, until it is unpinned as often."""
        self._pins[key] += 1

    def unpin(self, key: str) -> None:
        self._pins[key] -= 1
        if self._pins[key] <= 0:
            del self._pins[key]

    def bytes_of(self, key: str) -> int:
        """What a chunk takes of the budget, 0 where it is not there. No use of it."""
        chunk = self._chunks.get(key)
        return 0 if chunk is None else self._size(chunk)

    @property
    def room(self) -> int:
        """Bytes of the budget that are not pinned: what a chunk may take at most."""
        return self.budget_bytes - sum(self.bytes_of(key) for key in self._pins)

    def clear(self) -> None:
        self._chunks.clear()
        self._worth.clear()
        self.num_bytes = 0

    def _evict(self) -> bool:
        """Drop the chunk that is worth least and not pinned; False where there is none."""
        key = self._worth.pop_least(self._pins)
        if key is not None:
            self._drop(key)
        return key is not None

    def _keep(self, key: str, chunk: ChunkKV) -> None:
        self._chunks[key] = chunk
        self._worth.add(key, chunk.num_tokens**2 / self._size(chunk))
        self.num_bytes += self._size(chunk)

    def _drop(self, key: str) -> None:
        self.num_bytes -= self._size(self._chunks.pop(key))

    def _size(self, chunk: ChunkKV) -> int:
        return chunk.nbytes


class PinnedChunkStore(MemoryChunkStore):
    """Chunks in an arena of pinned host memory, which is all that the store ever takes.

    `put` copies: from a GPU in the background, so that the chunk is there when `ChunkKV.written` is. A chunk that was
    evicted keeps its piece of the arena for as long as requests, or copies in flight, hold it.
    """

    def __init__(self, arena: Arena, in_flight: InFlight) -> None:
        super().__init__(arena.num_bytes)
        self.arena, self.in_flight = arena, in_flight
        self.num_unpinned = 0  # chunks that found no room

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """As in the base class. A chunk for which nothing can be evicted is not kept, and comes back in ordinary host
        memory: what is needed now works, and loads slowly."""
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
        """As in the base class; None where running requests hold too much. For any one thread at a time: unlike `put`,
        this does not look at copies in flight, which are the engine's."""
        if piece_bytes(num_bytes) > self.budget_bytes:
            return None
        memory = self.arena.allocate(num_bytes)
        while memory is None and self._evict():
            memory = self.arena.allocate(num_bytes)
        return memory

    def holds(self, chunk: ChunkKV) -> bool:
        """Whether a chunk lies in the arena."""
        return self.arena.holds(chunk.k)

    def adopt(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """As in the base class. A chunk that there was no room for is not kept: it loads slowly, and is counted."""
        self.remove(key)
        if self.holds(chunk):
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

    def _size(self, chunk: ChunkKV) -> int:
        return piece_bytes(chunk.k.untyped_storage().nbytes())  # K and V share a piece


def make_chunk_store(
    budget_bytes: int, chunk_device: torch.device, engine_device: torch.device, in_flight: InFlight
) -> MemoryChunkStore:
    """The store of an engine whose chunks live on `chunk_device`; `in_flight` is what holds the chunks it loads.

    Raises ValueError where the host has too little memory to pin.
    """
    if chunk_device.type == "cpu" and engine_device.type == "cuda":
        return PinnedChunkStore(Arena(pinned_buffer(budget_bytes, "blend_chunk_cache_gib")), in_flight)
    return MemoryChunkStore(budget_bytes, chunk_device)
