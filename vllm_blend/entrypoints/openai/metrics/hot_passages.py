"""The passages that prompts have most often."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from vllm_blend.inputs import ParsedPrompt

MAX_PASSAGES = 2048
SHOWN_TOKENS, SHOWN_CHARACTERS = 32, 80


@dataclass
class HotPassage:
    """A passage: how often prompts had it, its length, and how its text begins."""

    num_uses: int
    num_tokens: int
    text: str


class HotPassages:
    """Counts the passages of prompts that have no salt, and forgets those that are rare."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._passages: dict[bytes, HotPassage] = {}

    def count(self, prompt: ParsedPrompt) -> None:
        """Count the passages of a prompt, unless a salt keeps them from other callers."""
        if prompt.salt:
            return
        for start, stop in prompt.chunk_bounds:
            tokens = prompt.token_ids[start:stop]
            key = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).digest()
            passage = self._passages.get(key)
            if passage is None:
                self._passages[key] = passage = HotPassage(0, len(tokens), self._beginning(tokens))
            passage.num_uses += 1
        if len(self._passages) > 2 * MAX_PASSAGES:
            self._passages = dict(self._ranked()[:MAX_PASSAGES])

    def top(self, count: int) -> list[HotPassage]:
        """Return the passages that were there most often."""
        return [passage for _, passage in self._ranked()[:count]]

    def _ranked(self) -> list[tuple[bytes, HotPassage]]:
        return sorted(self._passages.items(), key=lambda item: item[1].num_uses, reverse=True)

    def _beginning(self, tokens: list[int]) -> str:
        text = str(self._tokenizer.decode(tokens[:SHOWN_TOKENS]))
        return " ".join(text.split())[:SHOWN_CHARACTERS]
