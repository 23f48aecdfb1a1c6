"""`KVCacheManager`, the seed pipeline's name for what keeps chunk KV and moves it."""

from __future__ import annotations

import torch

from vllm_blend.features.offload.kv_cache_scheduler import KVCacheScheduler
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.memory import MemoryChunkStore
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.ops import cuda_library
from vllm_blend.ops.bindings import cpu_kernels


class KVCacheManager:
    """A facade over a store of chunk KV and, if an engine decodes with chunks off the device, its scheduler.

        engine = llm.llm_engine
        manager = KVCacheManager(store=engine.chunk_store, scheduler=engine.extension(ChunkOffload).scheduler)

    Without a store it has one of its own, of `budget_gib` in memory. With `require_kernels` it raises ImportError or
    RuntimeError, saying what to do, if the compiled kernels are absent: those of the GPU if torch sees one, those of
    the CPU otherwise. Plain torch works without them.
    """

    def __init__(
        self,
        require_kernels: bool = False,
        store: MemoryChunkStore | TieredChunkStore | None = None,
        scheduler: KVCacheScheduler | None = None,
        budget_gib: float = 4.0,
    ) -> None:
        if require_kernels:
            _require_kernels()
        self.store = MemoryChunkStore(int(budget_gib * 2**30)) if store is None else store
        self.scheduler = scheduler

    def __len__(self) -> int:
        return len(self.store)

    def __contains__(self, key: str) -> bool:
        return key in self.store

    def get(self, key: str) -> ChunkKV | None:
        """Return the KV of a chunk, None if the store does not have it."""
        return self.store.get(key)

    def put(self, key: str, chunk: ChunkKV) -> ChunkKV:
        """Store a chunk, and return the one to go on with."""
        return self.store.put(key, chunk)

    def remove(self, key: str) -> None:
        """Remove a chunk, if the store has it."""
        self.store.remove(key)

    def stats(self) -> dict[str, int]:
        """Count what is stored, and what has moved between device and host so far."""
        moves = self.scheduler
        return {
            "chunks": len(self.store),
            "bytes": self.store.num_bytes,
            "promotions": 0 if moves is None else moves.num_promotions,
            "evictions": 0 if moves is None else moves.num_evictions,
            "bytes_moved": 0 if moves is None else moves.num_bytes,
        }


def _require_kernels() -> None:
    if not torch.cuda.is_available():
        cpu_kernels()
        return
    reason = cuda_library.unavailable_reason()
    if reason is not None:
        raise RuntimeError(
            f"require_kernels=True, but the CUDA kernels cannot be used ({reason}): build them with "
            "scripts/build_cuda.sh, or leave require_kernels out"
        )
