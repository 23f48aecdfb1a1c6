"""Special tokens in texts that are not the program's own, hidden while a chat template puts the texts together."""

from __future__ import annotations

import re
import secrets
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]

# Rare ideographs, chosen at random, hide a token character by character; the first one says which token it is. Nobody
# can guess them, and no template escapes them.
_MOST = 0x1FFF
_FIRST, _FILLER = 0x20000 + secrets.randbelow(0xA6DF - _MOST), chr(0x2A700 + secrets.randbelow(0x1000))
_HIDDEN = re.compile(f"([{chr(_FIRST)}-{chr(_FIRST + _MOST)}]){_FILLER}+")


class HiddenTokens:
    """The special tokens of a tokenizer. Added ones that are not special, such as `<think>`, structure a message: they
    are not hidden."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        known = {text for text in (*added, *tokenizer.all_special_tokens) if len(text) > 1 and text.strip()}
        self._texts = sorted(known, key=lambda text: (-len(text), text))[:_MOST]  # as tokenizers do it: the longest
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    def hide(self, text: str) -> str:
        """Return a text of the same length without any special token."""
        return self._pattern.sub(self._stand_in, text)

    def _stand_in(self, found: re.Match[str]) -> str:
        return chr(_FIRST + self._numbers[found[0]]) + _FILLER * (len(found[0]) - 1)

    def reveal(self, text: str) -> tuple[str, list[Span]]:
        """Return a text with what is hidden in it, and where that stands. Raises ValueError if it was cut."""
        return _HIDDEN.sub(self._revealed, text), [found.span() for found in _HIDDEN.finditer(text)]

    def _revealed(self, found: re.Match[str]) -> str:
        number = ord(found[1]) - _FIRST
        if number >= len(self._texts) or len(self._texts[number]) != len(found[0]):
            raise ValueError(
                "the chat template takes apart a special token in an assistant's message, a tool or a field: remove it "
                "there, or start the engine with trusted_chunks=True if all texts come from you"
            )
        return self._texts[number]


def may_hide(text: str) -> bool:
    """Return whether anything may be hidden in a text."""
    return _FILLER in text


def hidden_tokens(tokenizer: PreTrainedTokenizerBase) -> HiddenTokens:
    """Return the special tokens of a tokenizer as it is now."""
    return _hidden_tokens(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _hidden_tokens(tokenizer: PreTrainedTokenizerBase, _: int) -> HiddenTokens:
    return HiddenTokens(tokenizer)
