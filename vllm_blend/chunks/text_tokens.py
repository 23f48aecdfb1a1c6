"""A text as tokens that know where they stand in it, and spans of the text as spans of tokens."""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import tokenizers
from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text: their ids, and where the text of each starts and stops. `offsets` is empty if the tokenizer
    does not say."""

    ids: list[int]
    offsets: Sequence[Span]

    @property
    def have_offsets(self) -> bool:
        return bool(self.offsets)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.offsets)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(stop for _, stop in self.offsets)

    def within(self, spans: Iterable[Span]) -> tuple[list[Span], int]:
        """Return the tokens (first, last + 1) of spans of characters, and how many spans share a token with the text
        beside them. Such a token is none of the span's, and a span without a token of its own is left out. So is one
        that has the last token of all: the answer follows that."""
        starts, stops, bounds, num_shared = self._starts, self._stops, [], 0
        for start, stop in spans:
            first, last = bisect_left(starts, start), bisect_right(stops, stop)
            num_shared += (first > 0 and stops[first - 1] > start) or (last < len(starts) and starts[last] < stop)
            if first < last < len(starts):
                bounds.append((first, last))
        return bounds, num_shared

    def count_before(self, position: int, limit: int) -> int:
        """Return how many of the first `limit` tokens end at a character at the latest."""
        return bisect_right(self._stops, position, hi=limit)


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> TextTokens:
    """Return the tokens of a text, without special tokens that it does not hold itself."""
    if not tokenizer.is_fast:
        return TextTokens(list(tokenizer.encode(text, add_special_tokens=False)), ())
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    backend = _without_trimming(tokenizer, len(tokenizer))
    if backend is None:
        return TextTokens(ids, encoded["offset_mapping"])
    encoding = backend.encode(text, add_special_tokens=False)
    return TextTokens(ids, encoding.offsets if encoding.ids == ids else ())


@lru_cache(maxsize=4)
def _without_trimming(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> tokenizers.Tokenizer | None:
    """Return a copy of a tokenizer of `num_tokens` tokens whose offsets are true. None if its own are: some
    post-processors of byte-level tokenizers leave white space out of them."""
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or b'"trim_offsets":true' not in processor.__getstate__():
        return None
    backend: tokenizers.Tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend
