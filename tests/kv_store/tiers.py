"""Tiers in memory that tests can hold up, break and look into."""

from __future__ import annotations

import threading

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.tally import Tally
from vllm_blend.kv_store.tiered import Allocate, Tier
from vllm_blend.kv_store.validation import ExpectedChunk

SECONDS = 120.0  # that nothing in these tests takes, on however slow a machine


def chunk(tokens: int, value: float = 1.0) -> ChunkKV:
    """Of 96 bytes a token."""
    kv = torch.full((3, tokens, 2, 2), float(value))
    return ChunkKV(kv, -kv)


class FakeStorage:
    """A dict. While `gate` is cleared, reads and writes wait; with `error` set they raise it."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.chunks: dict[str, ChunkKV] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.closed = False
        self.num_reads = 0
        self.entered = threading.Semaphore(0)  # released by whoever comes to the gate

    def __contains__(self, key: str) -> bool:
        return key in self.chunks

    def put(self, key: str, kv: ChunkKV) -> ChunkKV:
        self._pass()
        self.chunks[key] = kv.copy()
        return kv

    def read(self, key: str, allocate: Allocate, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        self.num_reads += 1
        self._pass()
        kv = self.chunks.get(key)
        if kv is None:
            self.tally.miss("absent")
            return None
        self.tally.hit(kv.nbytes)
        memory = allocate(kv.nbytes)
        assert memory is not None
        packed = memory.view(kv.k.dtype).view(kv.k.shape[0], 2, *kv.k.shape[1:])
        packed[:, 0], packed[:, 1] = kv.k, kv.v
        return ChunkKV(packed[:, 0], packed[:, 1])

    def remove(self, key: str) -> None:
        self.chunks.pop(key, None)

    def close(self) -> None:
        self.closed = True

    def _pass(self) -> None:
        self.entered.release()
        assert self.gate.wait(SECONDS)
        if self.error is not None:
            raise self.error


def tier(name: str, storage: FakeStorage, max_write_bytes: int = 1 << 20) -> Tier:
    def usage() -> tuple[int, int]:
        return sum(kv.nbytes for kv in storage.chunks.values()), len(storage.chunks)

    return Tier(name, storage, storage.read, max_write_bytes, usage, storage.close)
