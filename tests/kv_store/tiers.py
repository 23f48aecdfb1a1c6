"""Tiers in memory that tests can hold up, break and look into."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk
from vllm_blend.kv_store.host_memory import aligned_empty
from vllm_blend.kv_store.stats import StoreStats
from vllm_blend.kv_store.tiered import Tier
from vllm_blend.kv_store.tiers import Allocate

SECONDS = 120.0  # that nothing in these tests takes, on however slow a machine


def chunk(tokens: int, value: float = 1.0) -> ChunkKV:
    """Return a chunk with 96 bytes a token."""
    kv = torch.full((3, tokens, 2, 2), float(value))
    return ChunkKV(kv, -kv)


class FakeStorage:
    """A dict. While `gate` is cleared, reads and writes wait; with `error` set they raise it."""

    max_bytes_at_once = 0

    def __init__(self) -> None:
        self.stats = StoreStats()
        self.chunks: dict[str, ChunkKV] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.closed = False
        self.num_reads = 0
        self.entered = threading.Semaphore(0)  # released by each thread that comes to the gate

    def __contains__(self, key: str) -> bool:
        return key in self.chunks

    def put_many(self, chunks: Sequence[tuple[str, ChunkKV]]) -> None:
        for key, kv in chunks:
            self._pass()
            self.chunks[key] = kv.copy()

    def get(self, key: str, allocate: Allocate | None = None, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        self.num_reads += 1
        self._pass()
        kv = self.chunks.get(key)
        if kv is None:
            self.stats.count_miss("absent")
            return None
        self.stats.count_hit(kv.nbytes)
        memory = (allocate or aligned_empty)(kv.nbytes)
        assert memory is not None
        packed = memory.view(kv.k.dtype).view(kv.k.shape[0], 2, *kv.k.shape[1:])
        packed[:, 0], packed[:, 1] = kv.k, kv.v
        return ChunkKV(packed[:, 0], packed[:, 1])

    def remove(self, key: str) -> None:
        self.chunks.pop(key, None)

    def usage(self) -> tuple[int, int]:
        return sum(kv.nbytes for kv in self.chunks.values()), len(self.chunks)

    def held(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.closed = True

    def _pass(self) -> None:
        self.entered.release()
        assert self.gate.wait(SECONDS)
        if self.error is not None:
            raise self.error


def tier(name: str, storage: FakeStorage, max_write_bytes: int = 1 << 20) -> Tier:
    return Tier(name, storage, max_write_bytes)
