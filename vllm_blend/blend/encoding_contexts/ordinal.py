"""A chunk after as many passages as will stand before it."""

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

# Of the variants of a chunk that the store may hold: how many passages stand before it.
ORDINALS = (0, 1, 2, 3, 4, 6, 8, 11, 14, 18, 23)


@dataclass(frozen=True)
class AfterFiller(EncodingContext):
    """After the prefix and as many filler passages as chunks precede it in the prompt, or nearly: the nearest of
    `ordinals`, so that the store holds at most so many variants of a chunk.

    A model tells entities apart by an ordinal, the binding of Feng and Steinhardt ("How do Language Models Bind
    Entities in Context?", ICLR 2024): chunks that were all encoded as the first carry the same one, and their facts get
    mixed up. The filler is the project's own, and other for every chunk: the same one for all binds them alike.
    """

    name: ClassVar[str] = "ordinal"
    near: ClassVar[EncodingContext] = AfterPrefix()  # whose passages stand between the filler and the chunk
    filler_kind: ClassVar[type[Filler]] = Filler

    filler: Filler
    ordinals: tuple[int, ...] = ORDINALS

    def __post_init__(self) -> None:
        numbers = all(isinstance(i, int) and i >= 0 for i in self.ordinals)
        if not self.ordinals or not numbers or list(self.ordinals) != sorted(set(self.ordinals)):
            raise ValueError(
                f"blend_ordinals={list(self.ordinals)} must be ascending numbers of passages from 0 on, at least one: "
                "for example [0, 2, 5, 9, 14]"
            )

    def ordinal(self, index: int) -> int:
        """Of chunk `index` of a prompt: the nearest there is, the smaller one of two."""
        return min(self.ordinals, key=lambda ordinal: abs(ordinal - index))

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        near = self.near.passages(pieces, index)
        return [*self._filler(self.ordinal(index) - len(near), pieces.chunks[index]), *near]

    def _filler(self, count: int, chunk: Tokens) -> list[Tokens]:
        digest = hashlib.blake2b(array("q", chunk).tobytes(), digest_size=8).digest()
        return self.filler.passages(max(0, count), int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class AfterFillerAndNeighbour(AfterFiller):
    """The same, the last of the passages replaced by the chunk that precedes it in this prompt."""

    name: ClassVar[str] = "ordinal_neighbour"
    near: ClassVar[EncodingContext] = AfterNeighbour()


@dataclass(frozen=True)
class AfterFillerAndPage(AfterFiller):
    """A chunk that goes on from another one after what that was encoded after, and that chunk; others after filler.

    The passages of a page then carry the ordinals that follow one another, and a later one has seen just the KV that
    is stored of the earlier ones.
    """

    name: ClassVar[str] = "ordinal_page"
    near: ClassVar[EncodingContext] = AfterPage()

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        page = pieces.page_before(index)
        first = page[0] if page else index
        return [*self._filler(self.ordinal(first), pieces.chunks[first]), *(pieces.chunks[i] for i in page)]
