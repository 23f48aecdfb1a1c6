"""Encoding contexts say what a chunk is encoded after: one file per idea, and one registry of all."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext
from vllm_blend.blend.encoding_contexts.canonical import AfterBos, AfterPrefix
from vllm_blend.blend.encoding_contexts.filler import COUNT, AfterFiller
from vllm_blend.blend.encoding_contexts.related import AfterGiven, AfterPage
from vllm_blend.registry import Registry

ENCODING_CONTEXTS: Registry[type[EncodingContext]] = Registry(
    "encoding context", "blend_encoding_context", (AfterFiller, AfterPage, AfterPrefix, AfterBos, AfterGiven)
)
_COUNTED = re.compile(r"filler\((\d+)\)")


def check_encoding_context(name: str | None) -> None:
    """Raise ValueError for an encoding context that does not exist, or for a number of passages that there is not."""
    count = _count(name)
    if count is not None:
        AfterFiller(lambda text: [], count)
    elif name is not None:
        ENCODING_CONTEXTS.find(name)


def resolve_name(name: str | None, has_tokenizer: bool) -> str:
    """Return the name of an encoding context; of None, that of the default: filler, or page without a tokenizer."""
    return name or (AfterFiller.name if has_tokenizer else AfterPage.name)


def make_encoding_context(
    name: str | None, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None
) -> EncodingContext:
    """Return the encoding context called `name` (None: the default), or "filler(3)" with as many filler passages.

    Raises ValueError as `check_encoding_context` does, and if the context needs a tokenizer and there is none, or one
    with more tokens than the model's `vocab_size` (None: not looked at).
    """
    check_encoding_context(name)
    name = resolve_name(name, tokenizer is not None)
    count = _count(name)
    kind = ENCODING_CONTEXTS[name] if count is None else AfterFiller
    if kind not in (AfterBos, AfterFiller):
        return kind()
    if tokenizer is None:
        raise ValueError(
            f"blend_encoding_context={name!r} needs a tokenizer, and the engine has none: leave skip_tokenizer_init "
            "out, or use 'page' or 'prefix'"
        )
    if kind is AfterBos:
        return AfterBos(tokenizer.bos_token_id)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    found = AfterFiller(encode, COUNT if count is None else count)
    if vocab_size is not None and (largest := max(found.company(is_alone=False))) >= vocab_size:
        raise ValueError(
            f"blend_encoding_context={name!r}: the tokenizer gives the filler passages token {largest}, and the model "
            f"has {vocab_size}: give the tokenizer of this model, or use 'page' or 'prefix'"
        )
    return found


def _count(name: object) -> int | None:
    """Return the number of filler passages that a name gives, None if it gives none."""
    found = _COUNTED.fullmatch(name) if isinstance(name, str) else None
    return None if found is None else int(found[1])


__all__ = [
    "ENCODING_CONTEXTS",
    "ContextPieces",
    "EncodingContext",
    "check_encoding_context",
    "make_encoding_context",
    "resolve_name",
]
