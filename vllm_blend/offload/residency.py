"""Which chunks of a request are on the device, block by block.

What can move of a chunk are the blocks that lie wholly inside it. Blocks on its border, the prefix, the suffix and
generated tokens always stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MISSING = 0  # in a block table: the block is on the host. Block 0 is never given out, see BlockManager


def movable_blocks(start: int, stop: int, block_size: int) -> range:
    """Logical blocks that lie wholly inside the positions start .. stop - 1."""
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
    """The chunks of one request, over its block table, which is shared with it: a missing block is `MISSING` there.

    `generation` changes when the request gives its pages back; a move that finishes after that belongs to nobody.
    `version` changes whenever a chunk starts to move or has moved; a plan that was made before that is no use.
    """

    table: list[int]
    chunks: list[ChunkState]
    ranks: list[int]  # per chunk, 0 for the most relevant, as far as was known before the request ran
    generation: int = 0
    version: int = 0
    approximate: bool = False  # whether it was ever computed without some of its chunks

    @classmethod
    def of(
        cls, table: list[int], chunk_bounds: Sequence[tuple[int, int]], ranking: Sequence[int], block_size: int
    ) -> Residency:
        """All resident. `ranking`: chunks, most relevant first; those not named come after, in order."""
        order = [*ranking, *(index for index in range(len(chunk_bounds)) if index not in set(ranking))]
        ranks = [order.index(index) for index in range(len(chunk_bounds))]
        chunks = [
            ChunkState(index, movable_blocks(start, stop, block_size))
            for index, (start, stop) in enumerate(chunk_bounds)
        ]
        return cls(table, chunks, ranks)

    @property
    def movable(self) -> list[ChunkState]:
        return [chunk for chunk in self.chunks if chunk.blocks]

    @property
    def missing(self) -> Iterator[ChunkState]:
        return (chunk for chunk in self.chunks if not chunk.resident)

    @property
    def num_missing_blocks(self) -> int:
        return sum(len(chunk.blocks) for chunk in self.missing)

    @property
    def resident_chunks(self) -> list[int]:
        """Indices of the chunks that are whole on the device."""
        return [chunk.index for chunk in self.chunks if chunk.resident]

    def device_table(self) -> list[int]:
        """The blocks on the device, in order of position."""
        return [block for block in self.table if block != MISSING]

    def host_table(self) -> list[int]:
        """The host blocks of the chunks that are not on the device, in order of position."""
        return [block for chunk in self.missing for block in chunk.host]

    def device_blocks(self, chunk: ChunkState) -> list[int]:
        return [self.table[index] for index in chunk.blocks]
