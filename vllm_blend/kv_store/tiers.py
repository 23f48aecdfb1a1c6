"""The tiers of a chunk store by name, and what they and their users know of one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk
from vllm_blend.kv_store.pending import PendingChunk
from vllm_blend.kv_store.stats import StoreStats

MEMORY, DISK, REMOTE = "memory", "disk", "remote"

# Gives [bytes] uint8 on the host that a chunk is read to, page-aligned at best; None if there is no memory for it.
Allocate = Callable[[int], torch.Tensor | None]


@dataclass(frozen=True)
class ChunkLoad:
    """Loading a chunk from a tier, which may cost more than computing it again."""

    tier: str
    num_bytes: int
    num_tokens: int


class LoadObserver(Protocol):
    """Learns how fast chunks load, and decides which of them are computed instead. Called from several threads."""

    def loaded(self, what: ChunkLoad, seconds: float) -> None: ...

    def recompute(self, what: ChunkLoad) -> bool: ...


class TierStorage(Protocol):
    """The methods of a tier below the memory, for any thread. None raises an error of its medium: the tier misses,
    or does not store, and counts it."""

    stats: StoreStats

    @property
    def max_bytes_at_once(self) -> int:
        """Return the bytes of chunks that `put_many` takes at once; 0 where each is written by itself."""

    def __contains__(self, key: str) -> bool: ...

    def get(self, key: str, allocate: Allocate | None = None, expected: ExpectedChunk | None = None) -> ChunkKV | None:
        """Return a chunk; None if there is none. One that is not the expected one is dropped, and a miss."""

    def put_many(self, chunks: Sequence[tuple[str, ChunkKV]]) -> None: ...

    def remove(self, key: str) -> None: ...

    def usage(self) -> tuple[int, int] | None:
        """Return the bytes and the number of chunks that are stored, where they are known."""

    def held(self) -> Mapping[str, int]:
        """Return the bytes of each owner, by name, as far as they are known here."""

    def close(self) -> None: ...


ReadMany = Callable[[Sequence[str], Allocate, Mapping[str, ExpectedChunk]], "list[PendingChunk | None]"]
