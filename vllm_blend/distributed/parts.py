"""Stored KV of which every rank keeps its own heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class ChunkParts:
    """The parts of a chunk's KV on the other ranks, which know it by a number. They drop it when this object is gone,
    so it belongs to every `ChunkKV` on rank 0 that has the same KV."""

    number: int
