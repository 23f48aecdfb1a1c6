"""The passages of one prompt as pages, and how much each page and each sentence matters for the question, by its words.

The constants were chosen on worlds of the development split; docs/selection.md says what each part is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import fsum

from vllm_blend.blend.relevance.bm25 import bm25_scores, rarity
from vllm_blend.blend.relevance.words import PassageWords, Sentence, stems_of

MENTION_WEIGHT = 0.5  # of a page that mentions the best page, beside one that the best page leads to


def group_pages(num_passages: int, continues: Sequence[int | None]) -> list[list[int]]:
    """Return the passages of each page, ascending, and the pages in the order of their first passages. `continues` has,
    for each passage, an earlier one that it continues on its page, or None; if it is empty, each passage is a page."""
    pages: list[list[int]] = []
    page_of: list[list[int]] = []
    for index in range(num_passages):
        before = continues[index] if continues else None
        page: list[int] = [] if before is None else page_of[before]
        if before is None:
            pages.append(page)
        page.append(index)
        page_of.append(page)
    return pages


@dataclass(frozen=True)
class Link:
    """How a page leads to another: how strongly (0 for not at all), and by which of its words."""

    score: float = 0.0
    words: frozenset[str] = frozenset()
    is_asked_for: bool = False  # the other page has a word of the question that this one lacks


@dataclass(frozen=True)
class PageWords:
    """The words of a prompt's pages, passage by passage, and the different words of its question."""

    pages: Sequence[Sequence[PassageWords]]
    question: Sequence[str]

    def scores(self) -> list[float]:
        """Return how much each page is about the question: BM25 over whole pages, and once more the weight of each
        word of the question in a page's first sentence. A page that begins with a name is about it, while others only
        mention it."""
        asked = set(self.question)
        scores = bm25_scores(self._counts(asked), self._lengths)
        weights = self._rarities(asked)
        for index, head in enumerate(self._heads):
            scores[index] += fsum(weights[word] for word in asked & head.places.keys())
        return scores

    def links(self, best: int) -> list[Link]:
        """Return how the page `best` leads to each page.

        A question such as "In which country was Ada born?" needs a second page, which the first one names. Each word of
        `best` leads to the page whose first sentence has it soonest. A page that mentions `best` is linked as well: it
        has a word of the question that stands in the first sentence of `best`. Of linked pages, those matter most that
        a rare word links, and that have what the question asks and `best` lacks.
        """
        introduced = self._introduced(best)
        named = frozenset(word for word in self.question if word in self._heads[best].places)
        weights = self._rarities(named.union(*introduced))
        lacking = self._stems.keys() - self._page_stems[best]
        answers = bm25_scores(self._counts(lacking, stems=True), self._lengths)
        links = []
        for index, words in enumerate(introduced):
            mentions = fsum(weights[word] for word in named & self._words[index])
            score = max(map(weights.__getitem__, words), default=0.0) + MENTION_WEIGHT * mentions
            is_linked = score > 0 and index != best
            links.append(Link(score + answers[index], words, answers[index] > 0) if is_linked else Link())
        return links

    def match(self, sentence: Sentence) -> float:
        """Return the weight of the question's words that begin as words of a sentence do. Words of most pages tell no
        sentence apart and count nothing."""
        return fsum(self._stems[stem] for stem in self._stems.keys() & sentence.stems)

    def _introduced(self, best: int) -> list[frozenset[str]]:
        """Return the words of the page `best` that each page introduces: its first sentence has them soonest."""
        words = self._words[best].difference(self.question)
        soonest: dict[str, tuple[int, int]] = {}  # of a word: its place in the first sentence of a page, and the page
        for index, head in enumerate(self._heads):
            for word in words.intersection(head.places):
                found = head.places[word], index
                if word not in soonest or found < soonest[word]:
                    soonest[word] = found
        introduced: list[set[str]] = [set() for _ in self.pages]
        for word, (_, index) in soonest.items():
            introduced[index].add(word)
        return list(map(frozenset, introduced))

    @cached_property
    def _heads(self) -> list[Sentence]:
        return [page[0].sentences[0] for page in self.pages]

    @cached_property
    def _words(self) -> list[frozenset[str]]:
        return [
            frozenset().union(*(own.words for own in page)) if len(page) > 1 else page[0].words for page in self.pages
        ]

    @cached_property
    def _page_stems(self) -> list[Set[str]]:
        return [
            frozenset().union(*(own.stem_counts for own in page)) if len(page) > 1 else page[0].stem_counts.keys()
            for page in self.pages
        ]

    @cached_property
    def _lengths(self) -> list[int]:
        return [sum(own.length for own in page) for page in self.pages]

    @cached_property
    def _stems(self) -> dict[str, float]:
        """Return the beginnings of the question's words, with their weights in `match`."""
        stems, num = stems_of(self.question), len(self.pages)
        num_with = Counter(chain.from_iterable(stems.keys() & own for own in self._page_stems))
        return {stem: rarity(num_with[stem], num) if 2 * num_with[stem] <= num else 0.0 for stem in stems}

    def _counts(self, words: set[str], stems: bool = False) -> list[dict[str, int]]:
        """Return how often each page has each of some words, or stems, that it has at all. An intersection takes as
        long as its smaller side is large (CPython looks for the smaller one if they are no frozensets)."""
        counts: list[dict[str, int]] = []
        for page in self.pages:
            own: dict[str, int] = {}
            for passage in page:
                kept = passage.stem_counts if stems else passage.counts
                for word in words & kept.keys():
                    own[word] = own.get(word, 0) + kept[word]
            counts.append(own)
        return counts

    def _rarities(self, words: Set[str]) -> dict[str, float]:
        """Return the weight of each of `words`."""
        num_with = Counter(chain.from_iterable(words & own for own in self._words))
        return {word: rarity(num_with[word], len(self.pages)) for word in words}
