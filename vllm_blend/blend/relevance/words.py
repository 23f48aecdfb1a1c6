"""The words of passages, sentence by sentence, read once per passage.

A word is a run of letters and digits, whatever its case. Scripts that put no spaces between words (Chinese, Japanese,
Korean, Thai, ...) give overlapping pairs of characters instead, as search engines index them. No word is left out: in a
prompt's own passages the common ones weigh next to nothing anyway, in any language.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from types import MappingProxyType

import numpy as np
from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.relevance.numbers import Numbering, fixed

# Thai to Tibetan, Myanmar, Khmer, kana, Chinese characters, Hangul.
_UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_RUN = re.compile(rf"([{_UNSPACED}]+)|(?:(?![{_UNSPACED}])\w)+")
_ASCII_RUN = re.compile(r"\w+")  # the same for ASCII text, in a third of the time
_ENDS = (".", "!", "?", "…", "。", "！", "？", "।", "؟")
_CLOSING = "\"'”’»)]」』"
_MAY_END = frozenset((*_ENDS, *_CLOSING, " "))  # the last character of text that ends a sentence or follows its end
_DIGITS = "0123456789"
_INCOMPLETE = "\ufffd"  # what a decoder gives for a part of a character
_MAX_BYTES = 4  # of a character, each of which may be a token
_MOST_CLOSING = 16  # characters behind the end of a sentence that are looked at
MAX_WORD_BYTES = 1 << 27  # of different words, some 850,000 in English: behind more, all is read anew
MAX_PASSAGE_BYTES = 1 << 26  # of passages whose words are kept: some 2 million tokens by 512, or 0.8 million by 45
_PASSAGE_BYTES = 1200  # of a passage besides its words
_SHARED_NUMBERS = 257  # from 0 on: Python has these already, and others are objects of a passage's own
_WORD_BYTES = 40  # of a different word of a passage besides the arrays and the sentences that have it


def split_words(text: str) -> list[str]:
    """Return the words of a text, in their order."""
    if text.isascii():
        return _ASCII_RUN.findall(text.lower())
    words: list[str] = []
    for run in _RUN.finditer(text.casefold()):
        found = run[0]
        if run[1] is None or len(found) == 1:
            words.append(found)
        else:
            words += [found[at : at + 2] for at in range(len(found) - 1)]
    return words


def lower_words(text: str) -> list[str]:
    """Return the runs of letters and digits in a text that begin with a lower-case letter."""
    if text.isascii():
        return [run.lower() for run in _ASCII_RUN.findall(text) if run[0].islower()]
    return [run[0].casefold() for run in _RUN.finditer(text) if run[0][0].islower()]


@dataclass(frozen=True, slots=True)
class WeighedWords:
    """Words, and what a sentence counts for that has one of them."""

    weight: float
    numbers: Sequence[int]


@dataclass(frozen=True, slots=True)
class PassageWords:
    """The words of a passage, as numbers of a numbering.

    `words` has a column for each different word: its number, and twice the number of times that it occurs, and one more
    if it stands in the first sentence. `length` is the number of all words. Sentences stop at `stops`, in tokens, and
    the next one begins there; `sentences_with` has the numbers of the sentences that have a word, ascending. `head` are
    the words of the first sentence, in their order. The words `lower` stand in lower case somewhere in the passage.
    `capitals` has a column for each sentence with one of the others: the numbers of word and sentence. Of these words
    `names` are those that do not only begin sentences: names and numbers, as a rule.

    Other prompts are read from this, so nothing of it can be changed.
    """

    numbering: Numbering
    words: np.ndarray  # [2, different words] int64
    length: int
    stops: np.ndarray  # [sentences] int64
    sentences_with: Mapping[int, tuple[int, ...]]
    head: np.ndarray  # [words] int64
    lower: np.ndarray  # [words] int64
    capitals: np.ndarray  # [2, places] int64
    names: np.ndarray  # [words] int64

    @property
    def num_tokens(self) -> int:
        return int(self.stops[-1])

    @property
    def num_bytes(self) -> int:
        """Return about how much memory this takes."""
        arrays = (self.words, self.stops, self.head, self.lower, self.capitals, self.names)
        numbers = sum(map(sys.getsizeof, self.sentences_with.values()))
        numbers += max(0, len(self.stops) - _SHARED_NUMBERS) * sys.getsizeof(_SHARED_NUMBERS)
        return _PASSAGE_BYTES + sum(array.nbytes for array in arrays) + len(self.sentences_with) * _WORD_BYTES + numbers

    def sentences_with_any(self, numbers: Iterable[int]) -> Collection[int]:
        """Return the numbers of the sentences that have one of some words, each once."""
        sentences_with = self.sentences_with
        found = [sentences_with[number] for number in numbers if number in sentences_with]
        return found[0] if len(found) == 1 else set().union(*found)

    def weigh_sentences(self, words: Sequence[WeighedWords], among: Collection[int] | None = None) -> dict[int, float]:
        """Return the weights of those sentences that have some of the words, out of those `among` (None: all)."""
        weights: dict[int, list[float]] = {}
        for each in words if among is None or among else ():
            for sentence in self.sentences_with_any(each.numbers):
                weights.setdefault(sentence, []).append(each.weight)
        chosen = weights if among is None else weights.keys() & set(among)
        return {sentence: fsum(weights[sentence]) for sentence in chosen}


class WordIndex:
    """Reads the words of passages and questions, and remembers those of the passages used last. Not safe to use from
    several threads at once, as tokenizers are not."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        max_passage_bytes: int = MAX_PASSAGE_BYTES,
        max_word_bytes: int = MAX_WORD_BYTES,
    ) -> None:
        """Without a tokenizer each token is a word, and a passage is one sentence."""
        self._max_passage_bytes, self._max_word_bytes = max_passage_bytes, max_word_bytes
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Read passages with this tokenizer from now on, and forget what was read."""
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, PassageWords] = OrderedDict()
        self._num_bytes = 0  # of what is known
        self._token_texts: dict[int, str] = {}
        self._numbering = Numbering()

    def prompt(
        self,
        token_ids: Sequence[int],
        passages: Sequence[tuple[int, int]],
        question: tuple[int, int],
        keys: Sequence[str],
    ) -> tuple[list[PassageWords], list[str]]:
        """Return the words of a prompt's passages, and the different words of its question, each given by where it
        starts and stops. `keys` are those of the passages' chunks, so what a salt keeps apart is apart here too."""
        self._bound_numbering()  # now, as all passages of a prompt need the same numbers
        find, move_to_end = self._known.get, self._known.move_to_end
        words = []
        for index, key in enumerate(keys):
            own = find(key)
            if own is None:
                own = self._remember(key, token_ids[slice(*passages[index])])
            else:
                move_to_end(key)
            words.append(own)
        return words, self.question(token_ids[slice(*question)])

    def learn(self, key: str, token_ids: Sequence[int]) -> None:
        """Read the words of a passage that prompts will have, unless they are known."""
        if key not in self._known:
            self._bound_numbering()  # a server may store passages for days before a prompt comes
            self._remember(key, token_ids)

    def _bound_numbering(self) -> None:
        """Forget all words once they take too much memory."""
        if self._numbering.num_bytes > self._max_word_bytes:
            self.set_tokenizer(self._tokenizer)

    def forget(self, key: str) -> None:
        """Drop which words a passage has, if that is known. The words keep their numbers: others may have them too."""
        words = self._known.pop(key, None)
        self._num_bytes -= words.num_bytes if words else 0

    def _remember(self, key: str, token_ids: Sequence[int]) -> PassageWords:
        words = self._known[key] = self.read(token_ids)
        self._num_bytes += words.num_bytes
        while self._num_bytes > self._max_passage_bytes:
            self._num_bytes -= self._known.popitem(last=False)[1].num_bytes
        return words

    def read(self, token_ids: Sequence[int]) -> PassageWords:
        """Return the words of a passage without remembering them."""
        number_of = self._numbering.__getitem__
        counts: Counter[int] = Counter()
        stops: list[int] = []
        sentences_with: dict[int, list[int]] = {}
        head: list[int] = []
        lower: set[int] = set()
        inner: set[int] = set()
        for _, stop, text in self._split(token_ids):
            words = list(map(number_of, split_words(text)))
            counts.update(words)
            sentence = len(stops)
            for number in set(words):
                if number in sentences_with:
                    sentences_with[number].append(sentence)
                else:
                    sentences_with[number] = [sentence]
            lower.update(map(number_of, lower_words(text)))
            inner.update(words[1:])
            head = head if stops else words
            stops.append(stop)
        in_head = set(head)
        capitals = [(word, sentence) for word in counts.keys() - lower for sentence in sentences_with[word]]
        return PassageWords(
            self._numbering,
            fixed(counts, [2 * count + (number in in_head) for number, count in counts.items()]),
            counts.total(),
            fixed(stops),
            MappingProxyType({word: tuple(sentences) for word, sentences in sentences_with.items()}),
            fixed(head),
            fixed(lower),
            fixed([word for word, _ in capitals], [sentence for _, sentence in capitals]),
            fixed(inner - lower),
        )

    def question(self, token_ids: Sequence[int]) -> list[str]:
        """Return the different words of a question."""
        return list(dict.fromkeys(split_words(self._text(token_ids))))

    def _split(self, token_ids: Sequence[int]) -> list[tuple[int, int, str]]:
        """Return where sentences begin and stop, and their texts. A sentence ends with the token that ends it or its
        line, and includes the quotation marks and brackets behind that; the point in 3.14 ends none. Each has a word,
        if the passage has one."""
        whole = self._text(token_ids)
        if self._tokenizer is None:
            return [(0, len(token_ids), whole)]
        pieces = list(self._pieces(token_ids))
        bounds: list[tuple[int, int]] = []  # in pieces
        start, found = 0, False
        for at, (_, text) in enumerate(pieces, 1):
            found = found or bool(_RUN.search(text))
            ends = "\n" in text
            if text[-1] in _MAY_END and not ends:
                tail = "".join([text for _, text in pieces[max(start, at - _MOST_CLOSING) : at]])[-_MOST_CLOSING:]
                ends = tail.rstrip(_CLOSING + " ").endswith(_ENDS)
            if at == len(pieces) and not found and bounds:  # a blank line, say, belongs to what precedes it
                bounds[-1] = (bounds[-1][0], at)
            elif at == len(pieces) or (ends and found and pieces[at][1][0] not in _CLOSING + _DIGITS):
                bounds.append((start, at))
                start, found = at, False
        stops = [0, *(stop for stop, _ in pieces)]
        if "".join(text for _, text in pieces) == whole:  # which saves to decode every sentence by itself
            return [(stops[a], stops[b], "".join(text for _, text in pieces[a:b])) for a, b in bounds]
        return [(stops[a], stops[b], self._text(token_ids[stops[a] : stops[b]])) for a, b in bounds]

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the texts of tokens, and where each stops. Tokens that make one character are one piece."""
        parts: list[int] = []
        for stop, token in enumerate(token_ids, 1):
            parts.append(token)
            text = self._token_text(token) if len(parts) == 1 else self._text(parts)
            if text.endswith(_INCOMPLETE) and len(parts) < _MAX_BYTES and stop < len(token_ids):
                continue
            parts = []  # also where they decode to nothing: they belong to the piece that follows
            if text or stop == len(token_ids):
                yield stop, text or " "

    def _token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = self._text([token])
        return self._token_texts[token]

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
