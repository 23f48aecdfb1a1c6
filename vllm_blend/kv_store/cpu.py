"""Chunk KV in memory under a byte budget."""

from __future__ import annotations

from collections import OrderedDict

from vllm_blend.kv_store.chunk_kv import ChunkKV


class MemoryChunkStore:
    """Least recently used chunks leave first when the budget is reached; a chunk larger than the budget is not kept.

    The tensors are never written to: whoever places a chunk copies it into pages of its own.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes={budget_bytes} must be positive")
        self.budget_bytes = budget_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._chunks: OrderedDict[str, ChunkKV] = OrderedDict()

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
        self._chunks.move_to_end(key)
        return chunk

    def put(self, key: str, chunk: ChunkKV) -> None:
        self.remove(key)
        if chunk.nbytes > self.budget_bytes:
            return
        while self.num_bytes + chunk.nbytes > self.budget_bytes:
            self.remove(next(iter(self._chunks)))
        self._chunks[key] = chunk
        self.num_bytes += chunk.nbytes

    def remove(self, key: str) -> None:
        """Drop a chunk; nothing happens when it is not there."""
        chunk = self._chunks.pop(key, None)
        if chunk is not None:
            self.num_bytes -= chunk.nbytes

    def clear(self) -> None:
        self._chunks.clear()
        self.num_bytes = 0
