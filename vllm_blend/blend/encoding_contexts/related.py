"""Encode a chunk after passages that belong before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext, Tokens


@dataclass(frozen=True)
class AfterPage(EncodingContext):
    """Encode a chunk after the prefix and those passages of its own page that it continues and the prompt has
    (`continues`). A later passage says "she" or "the firm", and encoded alone it loses whom it is about. What stands
    before a passage on its page is the same in every prompt, so the KV is reused as often as without."""

    name: ClassVar[str] = "page"

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        return [pieces.chunks[i] for i in pieces.page_before(index)]


@dataclass(frozen=True)
class AfterGiven(EncodingContext):
    """Encode a chunk after the prefix and the text that the prompt names (`encode_after`): passages of its page that
    the prompt does not have, or the nearest ones of the corpus (FusionRAG). The chunk's key includes that text; if it
    is chosen without regard to the question, the KV is reused as often as without."""

    name: ClassVar[str] = "given"

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        return [pieces.encode_after[index]] if pieces.encode_after else []
