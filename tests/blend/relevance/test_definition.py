"""What `PageWords` says, against the same said plainly: by looking through all sentences for each word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import fsum, log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.blend.relevance.texts import TOKENIZER, Link, links_of, spans_of
from vllm_blend.blend.relevance.bm25 import K1, B
from vllm_blend.blend.relevance.pages import LATER_SHARE, PageWords
from vllm_blend.blend.relevance.words import WordIndex
from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.splits import DEVELOPMENT
from vllm_blend.quality.worlds import question_episode

pytestmark = pytest.mark.cpu_only

UNSPACED = [(0xE00, 0xFFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF)]
UNSPACED += [(0xAC00, 0xD7AF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)]
WORDS = ["Ada", "Brix", "ada", "Wesgro", "wesgro", "Firm", "firm", "born", "Born", "birth", "it", "It", "7", "STRASSE"]
WORDS += ["Straße", "京都", "京", "東京都", "İnci", "it's"]


@cache
def runs_of(text: str) -> tuple[str, ...]:
    """Return the longest stretches of letters and digits, and those of scripts without spaces."""
    runs: list[tuple[str, str]] = []
    kind_before = ""
    for char in text:
        unspaced = any(first <= ord(char) <= last for first, last in UNSPACED)
        kind = "unspaced" if unspaced else "spaced" if char.isalnum() or char == "_" else ""
        if kind and kind == kind_before:
            runs[-1] = (kind, runs[-1][1] + char)
        elif kind:
            runs.append((kind, char))
        kind_before = kind
    return tuple(run for _, run in runs)


@cache
def words_of(text: str) -> tuple[str, ...]:
    words: list[str] = []
    for run in runs_of(text.casefold()):
        pairs = [run[at : at + 2] for at in range(len(run) - 1)]
        words += pairs if any(first <= ord(run[0]) <= last for first, last in UNSPACED) and pairs else [run]
    return tuple(words)


@cache
def stems_of(text: str) -> tuple[str, ...]:
    return tuple(word[:3] for word in words_of(text))


class Plain:
    """Pages, each a list of passages, each a list of the texts of sentences, and the words of a question."""

    def __init__(self, pages: Sequence[Sequence[Sequence[str]]], question: Sequence[str]) -> None:
        self.pages, self.question = pages, question
        self.sentences = [[text for passage in page for text in passage] for page in pages]
        self.words = [[word for text in page for word in words_of(text)] for page in self.sentences]
        self.stems = [[stem for text in page for stem in stems_of(text)] for page in self.sentences]
        everything = [text for page in self.sentences for text in page]
        self.lower = {run.casefold() for text in everything for run in runs_of(text) if run[0].islower()}

    def rarity(self, word: str, texts: Sequence[Sequence[str]]) -> float:
        num_with = sum(word in text for text in texts)
        return log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))

    def bm25(self, page: int, words: Iterable[str], texts: Sequence[Sequence[str]]) -> float:
        mean = sum(map(len, texts)) / len(texts)
        parts = []
        for word in words:
            if count := texts[page].count(word):
                norm = K1 * (1 - B + B * len(texts[page]) / mean)
                parts.append(self.rarity(word, texts) * count / (count + norm))
        return fsum(parts)

    def score(self, page: int) -> float:
        head = words_of(self.sentences[page][0])
        return self.bm25(page, self.question, self.words) + fsum(
            self.rarity(word, self.words) for word in self.question if word in head
        )

    def names(self, page: int) -> set[str]:
        return {word for text in self.sentences[page] for word in words_of(text)[1:] if word not in self.lower}

    def stem_weight(self, stem: str) -> float:
        in_most = 2 * sum(stem in text for text in self.stems) > len(self.pages)
        return 0.0 if in_most else self.rarity(stem, self.stems)

    def match(self, text: str) -> float:
        return fsum(self.stem_weight(stem) for stem in {word[:3] for word in self.question} if stem in stems_of(text))

    def near(self, page: int, names: Iterable[str]) -> float:
        known = {word for page in self.words for word in page}
        asked = {word[:3] for word in self.question if word not in known or word in self.lower}
        weights = {stem: self.stem_weight(stem) for stem in asked}
        near = [text for text in self.sentences[page] if not set(names).isdisjoint(words_of(text))]
        return max((fsum(weights[stem] for stem in asked if stem in stems_of(text)) for text in near), default=0.0)

    def introduced(self, best: int) -> list[dict[str, float]]:
        heads = [words_of(page[0]) if index != best else () for index, page in enumerate(self.sentences)]
        shared = {w for w in self.words[best] if w not in self.question and any(w in head for head in heads)}
        names = {word for word in shared if word not in self.lower} or shared
        soonest = {
            name: min((head.index(name), index) for index, head in enumerate(heads) if name in head)[1]
            for name in names
        }
        return [
            {name: 1.0 if soonest[name] == index else LATER_SHARE for name in names if name in head}
            for index, head in enumerate(heads)
        ]

    def links(self, best: int) -> list[Link]:
        introduced = self.introduced(best)
        about = {word for word in self.question if word in words_of(self.sentences[best][0])}
        named = {word for word in about if word not in self.lower} or about
        lacking = {word[:3] for word in self.question} - set(self.stems[best])
        links = []
        for page, shares in enumerate(introduced):
            leads = [
                share * (self.rarity(name, self.words) + self.near(best, [name])) for name, share in shares.items()
            ]
            score = max(leads, default=0.0)
            mentions = fsum(self.rarity(name, self.words) for name in named if name in self.words[page])
            if mentions:
                whole = fsum(self.rarity(name, self.words) for name in named)
                score += (mentions / whole) ** 2 * (mentions + self.near(page, named))
            answer = self.bm25(page, lacking, self.stems)
            is_linked = page != best and score > 0
            links.append(Link(score + answer, frozenset(shares), answer > 0) if is_linked else Link())
        return links


def check(passages: Sequence[Sequence[str]], question: str, best: int | None = None) -> None:
    """Compare all that is said of some pages. `best`: the page whose links are looked at; by default all, in turn."""
    index = WordIndex(TOKENIZER)
    ids = [[TOKENIZER.encode(text, add_special_tokens=False) for text in page] for page in passages]
    read = [[index.read(own) for own in page] for page in ids]
    texts = [
        [[str(TOKENIZER.decode(own[slice(*span)])) for span in spans_of(known)] for own, known in rows]
        for rows in [list(zip(*page, strict=True)) for page in zip(ids, read, strict=True)]
    ]
    asked = list(dict.fromkeys(words_of(question)))
    fast, plain = PageWords(read, asked), Plain(texts, asked)
    assert index.question(TOKENIZER.encode(question, add_special_tokens=False)) == asked
    assert fast.scores() == [plain.score(page) for page in range(len(read))]
    for page in range(len(read)):
        assert fast.matches(page) == [plain.match(text) for text in plain.sentences[page]]
        names, words = plain.names(page), list(map(words_of, plain.sentences[page]))
        assert fast.with_names(page) == [index for index, own in enumerate(words) if not names.isdisjoint(own)]
    for page in range(len(read)) if best is None else [best]:
        assert links_of(fast, page) == plain.links(page)
        assert links_of(PageWords(read, asked), page) == plain.links(page)  # whatever was asked before


some_words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8)
some_passage = st.lists(some_words.map(lambda words: " ".join(words) + "."), min_size=1, max_size=4).map(" ".join)


@given(st.lists(st.lists(some_passage, min_size=1, max_size=3), min_size=1, max_size=6), some_words)
def test_few_words_in_many_places(passages: list[list[str]], question: list[str]) -> None:
    check(passages, " ".join(question) + "?")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", [str, str.lower])
def test_worlds(seed: int, case: type[str]) -> None:
    """Whole pages and their passages apart, and text without capitals, with questions about all kinds of things."""
    episode = question_episode(DEVELOPMENT.random(seed), 2)
    pages: dict[str, list[str]] = {}
    for passage in episode.passages:
        pages.setdefault(passage.page, []).append(case(passage.text))
    apart = [[text] for texts in pages.values() for text in texts]
    for number, question in enumerate(Random(seed).sample(episode.questions, 4)):
        for passages in (list(pages.values()), apart):
            check(passages, case(PROMPT_STYLES["musique"].suffix(question.text)), number % len(passages))
