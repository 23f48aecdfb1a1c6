"""Chunks of one prompt on their way from the disk together, so that the prompt can run while they arrive.

The disk gives the first layers of all of them first. From when those are there, a forward pass may begin: it asks for
each layer before it computes it, while the next ones are being read (CacheBlend, Yao et al., EuroSys 2025, section 5).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from vllm_blend.kv_store.chunk_kv import ChunkKV, ChunkLost
from vllm_blend.kv_store.pending import PendingChunk
from vllm_blend.kv_store.validation import ExpectedChunk

if TYPE_CHECKING:
    from vllm_blend.kv_store.tiered import DescribeChunk


@dataclass(frozen=True)
class LayerArrivals:
    """`ChunkKV.arriving` of a chunk that is being read from a disk."""

    pending: PendingChunk
    deadline: float  # time.monotonic, of all waits

    @property
    def is_whole(self) -> bool:
        return self.pending.is_whole

    @property
    def is_lost(self) -> bool:
        return self.pending.error is not None

    @property
    def bytes_left(self) -> int:
        return self.pending.bytes_left

    def wait_layer(self, layer: int) -> None:
        if self.pending.layer(layer, max(0.0, self.deadline - time.monotonic())) is None:
            raise ChunkLost(f"layer {layer} of a stored chunk did not arrive: {self.pending.error}")


@dataclass(frozen=True)
class WantedChunk:
    """A chunk that a prompt wants from the disk."""

    expected: ExpectedChunk
    describe: DescribeChunk | None = None  # for the observer's say; None where it is loaded in any case


@dataclass(frozen=True)
class Begun:
    """What became of asking a disk for chunks. Those in neither are not there."""

    pending: Mapping[str, PendingChunk] = field(default_factory=dict)
    declined: frozenset[str] = frozenset()  # there, and better computed


class Arrivals:
    """What one prompt wants from the disk. The thread that loads the first of its chunks begins to read all of them."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """`ready` is called in some thread when the first layer of every chunk that is being read is there, or never
        will be."""
        self.adding = threading.Lock()  # for who adds to `wanted`: nothing begins meanwhile
        self.wanted: dict[str, WantedChunk] = {}  # by key
        self._ready = ready
        self._begun: Begun | None = None
        self._without: set[str] = set()  # keys of which no layer is there yet

    def begin(self, read: Callable[[Mapping[str, WantedChunk]], Begun]) -> Begun:
        """What is being read, for a thread that may wait until that is known."""
        with self.adding:
            if self._begun is None:
                begun = read(self.wanted)
                self._without = set(begun.pending)
                self._begun = begun
                for key, pending in begun.pending.items():
                    pending.watch(first=partial(self._came, key))
            return self._begun

    def kv(self, key: str, deadline: float) -> ChunkKV | None:
        """A chunk of which the first layer is there, and the others will be by `deadline` (time.monotonic), or it is
        lost. Never waits."""
        begun = self._begun
        pending = None if begun is None else begun.pending.get(key)
        if pending is None or not pending.has(0):
            return None
        return replace(pending.kv, arriving=LayerArrivals(pending, deadline))

    def _came(self, key: str) -> None:
        self._without.discard(key)  # atomic
        if not self._without:
            self._ready()
