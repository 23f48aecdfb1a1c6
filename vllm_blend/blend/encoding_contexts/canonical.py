"""Encode every chunk after the same few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext, Tokens


@dataclass(frozen=True)
class AfterPrefix(EncodingContext):
    """Encode a chunk after the prompt's prefix, as if it were the first chunk: if it is, its KV is exact."""

    name: ClassVar[str] = "prefix"

    def passages(self, pieces: ContextPieces, index: int) -> Sequence[Tokens]:
        return ()


@dataclass(frozen=True)
class AfterBos(AfterPrefix):
    """Encode a chunk after BOS alone if the prefix begins with it, else after nothing: one entry of the store serves
    all prefixes (Prompt Cache, Gim et al., MLSys 2024, encodes its modules without what stands before them)."""

    name: ClassVar[str] = "bos"
    bos_token_id: int | None = None

    def head(self, pieces: ContextPieces) -> Tokens:
        has_bos = self.bos_token_id is not None and pieces.prefix[:1] == (self.bos_token_id,)
        return pieces.prefix[:1] if has_bos else ()
