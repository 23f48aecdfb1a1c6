"""Encoding contexts say what a chunk is encoded after: one file per idea, and one registry of all."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.encoding_contexts.base import ContextPieces, EncodingContext
from vllm_blend.blend.encoding_contexts.canonical import AfterBos, AfterPrefix
from vllm_blend.blend.encoding_contexts.filler import ORDINALS, AfterFiller
from vllm_blend.blend.encoding_contexts.related import AfterGiven, AfterPage
from vllm_blend.registry import Registry

ENCODING_CONTEXTS: Registry[type[EncodingContext]] = Registry(
    "encoding context", "blend_encoding_context", (AfterFiller, AfterPage, AfterPrefix, AfterBos, AfterGiven)
)
_WITH_ORDINALS = re.compile(r"filler\(([^()]*)\)")


def check_encoding_context(name: str | None) -> None:
    """Raise ValueError for an encoding context that does not exist, or for ordinals that cannot be."""
    ordinals = _ordinals(name)
    if ordinals is not None:
        AfterFiller(lambda text: [], ordinals)
    elif name is not None:
        ENCODING_CONTEXTS.find(name)


def resolve_name(name: str | None, has_tokenizer: bool) -> str:
    """Return the name of an encoding context; of None, that of the default: filler, or page without a tokenizer."""
    return name or (AfterFiller.name if has_tokenizer else AfterPage.name)


def make_encoding_context(name: str | None, tokenizer: PreTrainedTokenizerBase | None) -> EncodingContext:
    """Return the encoding context called `name` (None: the default), or "filler(0, 2)" with these ordinals.

    Raises ValueError as `check_encoding_context` does, and if the context needs a tokenizer and there is none.
    """
    check_encoding_context(name)
    name = resolve_name(name, tokenizer is not None)
    ordinals = _ordinals(name)
    kind = ENCODING_CONTEXTS[name] if ordinals is None else AfterFiller
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

    return AfterFiller(encode, ordinals or ORDINALS)


def _ordinals(name: object) -> tuple[int, ...] | None:
    """Return the ordinals that a name gives, None if it gives none."""
    found = _WITH_ORDINALS.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return None
    try:
        return tuple(int(number) for number in found[1].split(","))
    except ValueError:
        raise ValueError(
            f"blend_encoding_context={name!r} must name numbers of filler passages, such as 'filler(0, 2)'"
        ) from None


__all__ = [
    "ENCODING_CONTEXTS",
    "ORDINALS",
    "ContextPieces",
    "EncodingContext",
    "check_encoding_context",
    "make_encoding_context",
    "resolve_name",
]
