"""Encode a chunk after as many passages as will stand before it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext, Tokens
from vllm_blend.blend.encoding_contexts.canonical import AfterPrefix
from vllm_blend.blend.encoding_contexts.filler import Filler
from vllm_blend.blend.encoding_contexts.related import AfterNeighbour, AfterPage

# For each variant of a chunk that the store may hold: how many passages it is encoded after.
ORDINALS = (0, 1, 2, 3, 4, 6, 8, 11, 14, 18, 23)


@dataclass(frozen=True)
class AfterFiller(EncodingContext):
    """Encode a chunk after the prefix and about as many filler passages as chunks precede it in the prompt: the nearest
    of `ordinals`, so that the store holds at most that many variants of a chunk.

    A model tells entities apart by an ordinal (Feng and Steinhardt, "How do Language Models Bind Entities in Context?",
    ICLR 2024): chunks that were all encoded as the first one carry the same ordinal, and their facts get mixed up. Each
    chunk has filler of its own: the same filler before all would bind them alike.
    """

    name: ClassVar[str] = "ordinal"
    near: ClassVar[EncodingContext] = AfterPrefix()  # its passages stand between the filler and the chunk
    filler_kind: ClassVar[type[Filler]] = Filler

    filler: Filler
    ordinals: tuple[int, ...] = ORDINALS

    def __post_init__(self) -> None:
        numbers = all(isinstance(i, int) and i >= 0 for i in self.ordinals)
        if not self.ordinals or not numbers or list(self.ordinals) != sorted(set(self.ordinals)):
            raise ValueError(
                f"blend_ordinals={list(self.ordinals)} must be ascending numbers of passages, at least one: for "
                "example [0, 2, 5, 9, 14]"
            )

    def ordinal(self, index: int) -> int:
        """Return the ordinal that is nearest to `index`, the place of a chunk in the prompt; of two, the smaller
        one."""
        return min(self.ordinals, key=lambda ordinal: abs(ordinal - index))

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        near = self.near.passages(pieces, index)
        return [*self._filler(self.ordinal(index) - len(near), pieces.chunks[index]), *near]

    def _filler(self, count: int, chunk: Tokens) -> list[Tokens]:
        digest = hashlib.blake2b(array("q", chunk).tobytes(), digest_size=8).digest()
        return self.filler.passages(max(0, count), int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class AfterFillerAndNeighbour(AfterFiller):
    """Encode as `AfterFiller`, with the chunk that precedes it in this prompt in place of the last filler passage."""

    name: ClassVar[str] = "ordinal_neighbour"
    near: ClassVar[EncodingContext] = AfterNeighbour()


@dataclass(frozen=True)
class AfterFillerAndPage(AfterFiller):
    """Encode a chunk that continues another one after that chunk and all that it was encoded after; encode other chunks
    after filler.

    The passages of a page then carry consecutive ordinals, and a later one has seen exactly the KV that is stored for
    the earlier ones.
    """

    name: ClassVar[str] = "ordinal_page"
    near: ClassVar[EncodingContext] = AfterPage()

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        page = pieces.page_before(index)
        first = page[0] if page else index
        return [*self._filler(self.ordinal(first), pieces.chunks[first]), *(pieces.chunks[i] for i in page)]
