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

LATER_SHARE = 0.6  # of a page whose first sentence has a name, but later than another page's has it


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

        A question such as "In which country was Ada born?" needs a second page, which the first one names. Each name on
        `best` leads to the page whose first sentence has it soonest, and less to others that have it there. A page that
        mentions `best` is linked as well: it has a name of the question that stands in the first sentence of `best`.
        One that has only a part of the name, such as a surname, counts by the square of that part's weight. Of linked
        pages, those matter most that a rare name links, that are linked by a sentence with other words of the question
        ("born"), and that have what the question asks and `best` lacks.
        """
        introduced = self._introduced(best)
        about = frozenset(self.question) & self._heads[best].places.keys()
        named = self._names(about) or about
        weights = self._rarities(named.union(*introduced))
        near = {word: self._asked_near(best, {word}) for word in frozenset().union(*introduced)}
        lacking = self._stems.keys() - self._page_stems[best]
        answers = bm25_scores(self._counts(lacking, stems=True), self._lengths)
        whole = fsum(weights[word] for word in named)
        links = []
        for index, words in enumerate(introduced):
            leads = max((share * (weights[word] + near[word]) for word, share in words.items()), default=0.0)
            mentions = fsum(weights[word] for word in named & self._words[index])
            score = leads + ((mentions / whole) ** 2 * (mentions + self._asked_near(index, named)) if mentions else 0.0)
            is_linked = score > 0 and index != best
            links.append(Link(score + answers[index], frozenset(words), answers[index] > 0) if is_linked else Link())
        return links

    def match(self, sentence: Sentence) -> float:
        """Return the weight of the question's words that begin as words of a sentence do. Words of most pages tell no
        sentence apart and count nothing."""
        return fsum(self._stems[stem] for stem in self._stems.keys() & sentence.stems)

    def names(self, page: int) -> frozenset[str]:
        """Return the names and numbers of a page: words that do not only begin sentences, and that stand in no passage
        in lower case."""
        return self._names(frozenset().union(*(own.names for own in self.pages[page])))

    def _introduced(self, best: int) -> list[dict[str, float]]:
        """Return the names of the page `best` that each page introduces: they are in its first sentence. Each has a
        share: 1 for the page whose first sentence has it soonest, and less for others."""
        heads = [head.places if index != best else {} for index, head in enumerate(self._heads)]
        words = self._words[best].difference(self.question)
        shared = words & frozenset().union(*heads)
        names = self._names(shared) or shared  # people write all in lower case, too
        introduced: list[dict[str, float]] = [dict.fromkeys(names & head.keys(), LATER_SHARE) for head in heads]
        for name in names:
            soonest = min((head[name], index) for index, head in enumerate(heads) if name in head)[1]
            introduced[soonest][name] = 1.0
        return introduced

    def _names(self, words: frozenset[str]) -> frozenset[str]:
        """Return those of some words that stand in no passage in lower case. Scripts without capitals have no lower
        case either."""
        return words.difference(*(passage.lower & words for page in self.pages for passage in page))

    def _asked_near(self, page: int, words: Set[str]) -> float:
        """Return how much of what the question asks stands in one sentence of a page with one of `words`."""
        near = (own for passage in self.pages[page] for own in passage.sentences if words & own.places.keys())
        return max((fsum(self._asked[stem] for stem in self._asked.keys() & own.stems) for own in near), default=0.0)

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
    def _asked(self) -> dict[str, float]:
        """Return `_stems` without the names: not whom or what the question is about, but what it asks."""
        known = frozenset(word for word in self.question if any(word in own for own in self._words))
        asked = stems_of(set(self.question) - self._names(known))
        return {stem: weight for stem, weight in self._stems.items() if stem in asked}

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
