"""The chunks of a request that are on the device, block by block.

Only blocks that lie wholly inside a chunk can move. Blocks on its border, the prefix, the suffix and generated tokens
always stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_blend.request import StateKey


def movable_blocks(start: int, stop: int, block_size: int) -> range:
    """Return the logical blocks that lie wholly inside the positions start .. stop - 1."""
    first = -(-start // block_size)
    return range(first, max(first, stop // block_size))


@dataclass(eq=False)
class ChunkState:
    """One chunk of a request. `host` holds its blocks' copies on the host, in order: K and V of a prompt never change,
    so a copy stays good when the chunk comes back, and leaving again costs nothing."""

    index: int
    blocks: range  # logical
    resident: bool = True
    moving: bool = False
    moved_at: int = 0  # the scheduler's step of its last move
    host: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Residency:
    """The chunks of one request, over its block table, which is shared with it: a block on the host is `MISSING` there.

    `generation` changes when the request returns its pages; a move that finishes after that is dropped. `version`
    changes whenever a chunk starts to move or has moved; a plan that was made before that is dropped.
    """

    table: list[int]
    chunks: list[ChunkState]
    ranks: list[int]  # per chunk, 0 for the most relevant, as far as was known before the request ran
    generation: int = 0
    version: int = 0

    @classmethod
    def from_bounds(
        cls, table: list[int], chunk_bounds: Sequence[tuple[int, int]], ranking: Sequence[int], block_size: int
    ) -> Residency:
        """Return the residency of chunks that are all on the device. `ranking` names chunks, most relevant first; those
        not named come after, in order."""
        order = [*ranking, *(index for index in range(len(chunk_bounds)) if index not in set(ranking))]
        ranks = [order.index(index) for index in range(len(chunk_bounds))]
        chunks = [
            ChunkState(index, movable_blocks(start, stop, block_size))
            for index, (start, stop) in enumerate(chunk_bounds)
        ]
        return cls(table, chunks, ranks)

    @property
    def movable(self) -> list[ChunkState]:
        """Return the chunks that have blocks which can move."""
        return [chunk for chunk in self.chunks if chunk.blocks]

    @property
    def missing(self) -> Iterator[ChunkState]:
        """Return the chunks that are on the host."""
        return (chunk for chunk in self.chunks if not chunk.resident)

    @property
    def num_missing_blocks(self) -> int:
        """Return how many blocks are on the host."""
        return sum(len(chunk.blocks) for chunk in self.missing)

    @property
    def resident_chunks(self) -> list[int]:
        """Return the indices of the chunks that are whole on the device."""
        return [chunk.index for chunk in self.chunks if chunk.resident]

    def host_table(self) -> list[int]:
        """Return the host blocks of the chunks that are not on the device, in order of position."""
        return [block for chunk in self.missing for block in chunk.host]

    def device_blocks(self, chunk: ChunkState) -> list[int]:
        """Return the table's entries for the blocks of a chunk."""
        return [self.table[index] for index in chunk.blocks]


@dataclass(eq=False)
class OffloadState:
    """The chunks of a request's prompt, which may move while it decodes."""

    chunk_bounds: Sequence[tuple[int, int]]
    chunk_ranking: Sequence[int]  # chunks, most relevant first, as the prompt says
    residency: Residency | None = None  # from the end of the prefill on


OFFLOAD: StateKey[OffloadState] = StateKey("offload")
