"""A chunk after passages that belong before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext, Tokens


@dataclass(frozen=True)
class AfterPage(EncodingContext):
    """After the prefix and the passages that the chunk goes on from on its own page, as far as the prompt has them
    (`continues`). A later passage says "she" or "the firm": encoded alone it loses whom it is about. What stands before
    a passage on its page is the same in every prompt, so the KV is reused as often as without."""

    name: ClassVar[str] = "page"

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        return [pieces.chunks[i] for i in pieces.page_before(index)]


@dataclass(frozen=True)
class AfterGiven(EncodingContext):
    """After the prefix and what the prompt names (`encode_after`): passages of its page that the prompt does not have,
    or those of the corpus that are nearest to it (FusionRAG). Its key names them: where they are chosen without the
    question, the KV is reused as often as without."""

    name: ClassVar[str] = "given"

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        return [pieces.encode_after[index]] if pieces.encode_after else []


@dataclass(frozen=True)
class AfterNeighbour(EncodingContext):
    """After the prefix and the chunk that precedes it in this prompt, whatever that is. Its key names the neighbour, so
    it serves other prompts only where the two stand side by side again."""

    name: ClassVar[str] = "neighbour"

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        return [pieces.chunks[index - 1]] if index else ()
