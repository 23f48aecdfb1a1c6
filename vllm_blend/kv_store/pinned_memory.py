"""Chunk KV in pinned host memory, which a GPU copies from by itself; and the memory tier that an engine needs."""

from __future__ import annotations

import logging

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.host_memory import Arena, piece_bytes, pinned_buffer
from vllm_blend.kv_store.memory import MemoryChunkStore
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.kv_store.transfer import InFlight, copy_to_host

logger = logging.getLogger(__name__)


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
        memory = self._allocate(chunk.nbytes, chunk.owner)
        if memory is None:
            self.num_refused += 1
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

    def allocate(self, num_bytes: int, owner: Owner = ANYONE) -> torch.Tensor | None:
        """Return a piece of the arena as the base class says; None if running requests, or other owners, hold too much.

        For one thread at a time: unlike `put`, this does not look at copies in flight, which are the engine's.
        """
        memory: torch.Tensor | None = None

        def is_done() -> bool:
            nonlocal memory
            memory = self.arena.allocate(num_bytes)
            return memory is not None

        self._make_room(owner, piece_bytes(num_bytes), is_done)
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
            self.num_refused += 1
        return chunk

    def _allocate(self, num_bytes: int, owner: Owner) -> torch.Tensor | None:
        self.in_flight.release()
        memory = self.allocate(num_bytes, owner)
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
