"""The words of passages, sentence by sentence, read once per passage.

A word is a run of letters and digits, whatever its case. Scripts that put no spaces between words (Chinese, Japanese,
Korean, Thai, ...) give overlapping pairs of characters instead, as search engines index them. No word is left out: in a
prompt's own passages the common ones weigh next to nothing anyway, in any language.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass
from sys import intern
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

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
_STEM_LETTERS = 3  # "founded" and "founder" are alike then, "born" and "birth" are not
_MOST_CLOSING = 16  # characters behind the end of a sentence that are looked at
_TOKENS_BESIDES = 16  # which take as much memory as a passage takes beside its tokens
MAX_TOKENS = 1 << 20  # of passages whose words are kept: measured, 150 (of 512 tokens) to 165 MB (of 45)


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


def stems_of(words: Iterable[str]) -> dict[str, None]:
    """Return the different beginnings of words, in the order of the words."""
    return dict.fromkeys(word[:_STEM_LETTERS] for word in words)


@dataclass(frozen=True, slots=True)
class Sentence:
    """The tokens `start` to `stop` - 1 of a passage. `places` has, for each word in them, how many words precede it."""

    start: int
    stop: int
    places: Mapping[str, int]
    stems: frozenset[str]


@dataclass(frozen=True, slots=True)
class PassageWords:
    """The words of a passage: how often each word and each stem occurs, how many words there are, the sentences, which
    of them have each word, and which words stand in lower case somewhere in it. Of the others, `names` are those that
    do not only begin sentences: names and numbers, as a rule. `head_names` are those of the first sentence, with the
    word that begins it.

    `words`, `stems` and `lower` are the keys of dicts: they cannot be changed, and take less memory than sets.
    """

    counts: Mapping[str, int]
    stem_counts: Mapping[str, int]
    length: int
    sentences: tuple[Sentence, ...]
    sentences_with: Mapping[str, Sequence[int]]
    words: KeysView[str]
    stems: KeysView[str]
    lower: KeysView[str]
    names: frozenset[str]
    head_names: frozenset[str]

    @property
    def num_tokens(self) -> int:
        return self.sentences[-1].stop


class WordIndex:
    """Reads the words of passages and questions, and remembers those of the passages used last. Not safe to use from
    several threads at once, as tokenizers are not."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, max_tokens: int = MAX_TOKENS) -> None:
        """Without a tokenizer each token is a word, and a passage is one sentence."""
        self._max_tokens = max_tokens
        self.set_tokenizer(tokenizer)

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Read passages with another tokenizer from now on."""
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, PassageWords] = OrderedDict()
        self._num_tokens = 0
        self._token_texts: dict[int, str] = {}

    def passage(self, key: str, token_ids: Sequence[int]) -> PassageWords:
        """Return the words of a passage. `key` is that of its chunk, so what a salt keeps apart is apart here too."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.read(token_ids)
            self._num_tokens += known.num_tokens + _TOKENS_BESIDES
            while self._num_tokens > self._max_tokens:
                self._num_tokens -= self._known.popitem(last=False)[1].num_tokens + _TOKENS_BESIDES
        else:
            self._known.move_to_end(key)
        return known

    def read(self, token_ids: Sequence[int]) -> PassageWords:
        """Return the words of a passage without remembering them."""
        counts: Counter[str] = Counter()
        stem_counts: Counter[str] = Counter()
        sentences: list[Sentence] = []
        sentences_with: dict[str, tuple[int, ...]] = {}
        lower: dict[str, None] = {}
        inner: set[str] = set()
        for start, stop, text in self._split(token_ids):
            words = [intern(word) for word in split_words(text)]
            stems = [intern(word[:_STEM_LETTERS]) for word in words]
            lower.update(dict.fromkeys(lower_words(text)))
            inner.update(words[1:])
            counts.update(words)
            stem_counts.update(stems)
            places = {word: place for place, word in reversed(list(enumerate(words)))}
            here = (len(sentences),)  # one object for all words that stand in one sentence only
            for word in places:
                sentences_with[word] = sentences_with[word] + here if word in sentences_with else here
            sentences.append(Sentence(start, stop, MappingProxyType(places), frozenset(stems)))
        own, own_stems = dict(counts), dict(stem_counts)
        head = sentences[0].places.keys() if sentences else set()
        return PassageWords(
            MappingProxyType(own),  # what other prompts will be read from is not for a user's selector to change
            MappingProxyType(own_stems),
            counts.total(),
            tuple(sentences),
            MappingProxyType(sentences_with),
            own.keys(),
            own_stems.keys(),
            lower.keys(),
            frozenset(inner - lower.keys()),
            frozenset(head - lower.keys()),
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
