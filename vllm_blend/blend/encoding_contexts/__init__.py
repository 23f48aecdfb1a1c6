"""Encoding contexts say what a chunk is encoded after: one file per idea, and one registry of all."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext
from vllm_blend.blend.encoding_contexts.canonical import AfterBos, AfterPrefix
from vllm_blend.blend.encoding_contexts.filler import ORDINALS, AfterFiller
from vllm_blend.blend.encoding_contexts.related import AfterGiven, AfterPage
from vllm_blend.registry import Registry

ENCODING_CONTEXTS: Registry[type[EncodingContext]] = Registry(
    "encoding context", "blend_encoding_context", (AfterFiller, AfterPage, AfterPrefix, AfterBos, AfterGiven)
)


def check_encoding_context(name: str | None, ordinals: Sequence[int] | None) -> None:
    """Raise ValueError for an unknown name, for ordinals that the context does not use, and for invalid ordinals."""
    kind = AfterFiller if name is None else ENCODING_CONTEXTS.find(name)
    if ordinals is None:
        return
    if isinstance(ordinals, str) or not isinstance(ordinals, Sequence):
        raise ValueError(f"blend_ordinals={ordinals!r} must be a list of numbers, such as {list(ORDINALS)}")
    if kind is not AfterFiller:
        raise ValueError(
            f"blend_ordinals={list(ordinals)} counts filler passages, which blend_encoding_context={name!r} does not "
            "have: leave it out, or choose 'filler'"
        )
    AfterFiller(lambda text: [], tuple(ordinals))


def make_encoding_context(
    name: str | None, tokenizer: PreTrainedTokenizerBase | None, ordinals: Sequence[int] | None = None
) -> EncodingContext:
    """Return the encoding context called `name`; of None, the default. Raises ValueError as `check_encoding_context`
    does, and if the context needs a tokenizer and there is none."""
    check_encoding_context(name, ordinals)
    if name is None:
        name = AfterPage.name if tokenizer is None and ordinals is None else AfterFiller.name
    kind = ENCODING_CONTEXTS[name]
    if kind not in (AfterBos, AfterFiller):
        return kind()
    if tokenizer is None:
        raise ValueError(
            f"blend_encoding_context={name!r} needs a tokenizer, and the engine has none: leave skip_tokenizer_init "
            "out, or use 'page' or 'prefix'"
        )
    if kind is AfterBos:
        return AfterBos(tokenizer.bos_token_id)
    encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    return AfterFiller(encode, ORDINALS if ordinals is None else tuple(ordinals))


__all__ = [
    "ENCODING_CONTEXTS",
    "ORDINALS",
    "ContextPieces",
    "EncodingContext",
    "check_encoding_context",
    "make_encoding_context",
]
