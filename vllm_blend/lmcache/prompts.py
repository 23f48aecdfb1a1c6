"""Prompts in pieces that are strings all the same, as LMCache's blending API passes them around.

LMCache joins the pieces by a separator and looks for it in the text or among the tokens, where it may be tokenized
differently. Here the pieces travel with the string; only a plain string is split at the separator.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_blend.checks import a_type
from vllm_blend.lmcache.config import load_config


class BlendPrompt(str):
    """The string of `pieces` joined by `separator`, which still knows its pieces. A slice or a sum of it does not."""

    pieces: tuple[str, ...]
    separator: str

    def __new__(cls, pieces: Sequence[str], separator: str) -> BlendPrompt:
        self = super().__new__(cls, separator.join(pieces))
        self.pieces, self.separator = tuple(pieces), separator
        return self

    def __getnewargs__(self) -> tuple[tuple[str, ...], str]:  # type: ignore[override]
        """Return the arguments that copies and pickles are made from."""
        return self.pieces, self.separator


def split_prompt(prompt: str, separator: str) -> tuple[str, ...]:
    """Return the pieces of a prompt, without empty ones."""
    pieces = prompt.pieces if isinstance(prompt, BlendPrompt) else prompt.split(separator)
    return tuple(piece for piece in pieces if piece)


def combine_input_prompt_chunks(prompt_chunks: Sequence[str]) -> str:
    """Return one prompt of several pieces, such as instruction, documents and question. The last piece is always
    computed.

    The token ids are those of the joined pieces, without separators. Raises TypeError unless `prompt_chunks` is a list
    of strings, and ValueError if all of them are empty.
    """
    if isinstance(prompt_chunks, str) or not isinstance(prompt_chunks, Sequence):
        raise TypeError(f"prompt_chunks is {a_type(prompt_chunks)}: give a list of strings")
    pieces: list[str] = []
    for index, chunk in enumerate(prompt_chunks):
        if not isinstance(chunk, str):
            raise TypeError(f"prompt_chunks[{index}] is {a_type(chunk)}: give strings")
        pieces += chunk.pieces if isinstance(chunk, BlendPrompt) else [str(chunk)]
    if not any(pieces):
        raise ValueError("prompt_chunks holds no text: give at least the question")
    return BlendPrompt(pieces, load_config().separator)


def append_separator(input_prompt: str) -> str:
    """Return a prompt that ends with the separator, as scripts for early LMCache build prompts."""
    return combine_input_prompt_chunks([input_prompt, ""])
