"""Encoding contexts say what a chunk is encoded after: one file per idea, and one registry of all."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext
from vllm_blend.blend.encoding_contexts.canonical import AfterBos, AfterPrefix
from vllm_blend.blend.encoding_contexts.filler import Filler
from vllm_blend.blend.encoding_contexts.ordinal import (
    ORDINALS,
    AfterFiller,
    AfterFillerAndNeighbour,
    AfterFillerAndPage,
)
from vllm_blend.blend.encoding_contexts.related import AfterGiven, AfterNeighbour, AfterPage
from vllm_blend.registry import Registry

ENCODING_CONTEXTS: Registry[type[EncodingContext]] = Registry(
    "encoding context",
    "blend_encoding_context",
    (
        AfterPrefix,
        AfterBos,
        AfterPage,
        AfterGiven,
        AfterNeighbour,
        AfterFiller,
        AfterFillerAndPage,
        AfterFillerAndNeighbour,
    ),
)


def check_encoding_context(name: str, ordinals: Sequence[int] | None) -> None:
    """Raise ValueError for an unknown name, for ordinals that the context does not use, and for invalid ordinals."""
    kind = ENCODING_CONTEXTS.find(name)
    if ordinals is None:
        return
    if isinstance(ordinals, str) or not isinstance(ordinals, Sequence):
        raise ValueError(f"blend_ordinals={ordinals!r} must be a list of numbers, such as [0, 2, 5, 9, 14]")
    if not issubclass(kind, AfterFiller):
        raise ValueError(
            f"blend_ordinals={list(ordinals)} needs filler, which blend_encoding_context={name!r} does not use: "
            "leave it out, or choose 'ordinal' or 'ordinal_page'"
        )
    AfterFiller(Filler(lambda text: []), tuple(ordinals))


def make_encoding_context(
    name: str, tokenizer: PreTrainedTokenizerBase | None, ordinals: Sequence[int] | None = None
) -> EncodingContext:
    """Return the encoding context called `name`. Raises ValueError as `check_encoding_context` does, and if the context
    needs a tokenizer and there is none."""
    check_encoding_context(name, ordinals)
    kind = ENCODING_CONTEXTS[name]
    if tokenizer is None:
        if issubclass(kind, (AfterBos, AfterFiller)):
            raise ValueError(
                f"blend_encoding_context={name!r} needs a tokenizer, and the engine has none: leave "
                "skip_tokenizer_init out, or use 'prefix' or 'page'"
            )
        return kind()
    if issubclass(kind, AfterFiller):
        filler = kind.filler_kind(lambda text: list(tokenizer.encode(text, add_special_tokens=False)))
        return kind(filler, ORDINALS if ordinals is None else tuple(ordinals))
    if kind is AfterBos:
        return AfterBos(tokenizer.bos_token_id)
    return kind()


__all__ = [
    "ENCODING_CONTEXTS",
    "ORDINALS",
    "ContextPieces",
    "EncodingContext",
    "check_encoding_context",
    "make_encoding_context",
]
