"""The passages of one prompt as pages, and how much each page and each sentence matters for the question, by its words.

A step waits for this. So each page is asked once which words of the question it has, and which of their beginnings;
what follows looks at these few. The words of a page with several passages are not united, but for the best page.

The constants were chosen on worlds of the development split; docs/selection.md says what each part is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import fsum

from vllm_blend.blend.relevance.bm25 import bm25_scores, rarities, rarity
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


_NO_LINK = Link()


@dataclass(frozen=True)
class PageWords:
    """The words of a prompt's pages, passage by passage, and the different words of its question."""

    pages: Sequence[Sequence[PassageWords]]
    question: Sequence[str]

    def scores(self) -> list[float]:
        """Return how much each page is about the question: BM25 over whole pages, and once more the weight of each
        word of the question in a page's first sentence. A page that begins with a name is about it, while others only
        mention it."""
        weights = self._weights
        scores = bm25_scores(self._counts, self._lengths, weights)
        for index, own in enumerate(self._counts):
            if own:
                head = self._head(index)
                scores[index] += fsum([weights[word] for word in own if word in head])
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
        head, weights = self._head(best), self._weights
        about = frozenset([word for word in self._counts[best] if word in head])
        named = about & self._question_names or about
        whole = fsum([weights[word] for word in named])
        introduced = self._introduced(best)
        scores = self._leads(best, introduced)
        for index, own in enumerate(self._counts):
            if index != best and not named.isdisjoint(own):
                mentions = fsum([weights[word] for word in named if word in own])
                mention = (mentions / whole) ** 2 * (mentions + self._asked_near(index, named))
                scores[index] = scores.get(index, 0.0) + mention
        links = [_NO_LINK] * len(self.pages)
        for index, answer in self._answers(best, scores).items():
            links[index] = Link(scores[index] + answer, frozenset(introduced.get(index, ())), answer > 0)
        return links

    def match(self, sentence: Sentence) -> float:
        """Return the weight of the question's words that begin as words of a sentence do. Words of most pages tell no
        sentence apart and count nothing."""
        known = self._matches.get(sentence.stems)
        if known is None:
            known = self._matches[sentence.stems] = _weight(self._rare_stems, sentence.stems)
        return known

    def names(self, page: int) -> frozenset[str]:
        """Return the names and numbers of a page: words that do not only begin sentences, and that stand in no passage
        in lower case."""
        known = self._names_of.get(page)
        if known is None:
            words = frozenset().union(*[own.names for own in self.pages[page]])
            known = self._names_of[page] = self._names(words)
        return known

    def _introduced(self, best: int) -> dict[int, dict[str, float]]:
        """Return the names of the page `best` that other pages introduce, by page: they are in its first sentence. Each
        has a share: 1 for the page whose first sentence has it soonest, and less for others."""
        words = frozenset().union(*[own.words for own in self.pages[best]]).difference(self.question)
        heads = [(index, page[0]) for index, page in enumerate(self.pages) if index != best]
        capitals = [(index, words & own.head_names) for index, own in heads]
        names = self._names(frozenset().union(*[own for _, own in capitals]))
        if not names:  # people write all in lower case, too
            capitals = [(index, words & own.sentences[0].places.keys()) for index, own in heads]
            names = frozenset().union(*[own for _, own in capitals])
        introduced = {
            index: dict.fromkeys(names & own, LATER_SHARE) for index, own in capitals if not names.isdisjoint(own)
        }
        soonest: dict[str, tuple[int, int]] = {}
        for index, names_there in introduced.items():
            head = self._head(index)
            for name in names_there:
                if name not in soonest or head[name] < soonest[name][0]:
                    soonest[name] = head[name], index
        for name, (_, index) in soonest.items():
            introduced[index][name] = 1.0
        return introduced

    def _leads(self, best: int, introduced: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
        """Return how strongly the names on the page `best` lead to the pages that introduce them."""
        names = frozenset().union(*introduced.values())
        near = {name: self._asked_near(best, frozenset((name,))) for name in names}
        with_names = [frozenset().union(*[names & own.words for own in page]) for page in self.pages]
        weights = rarities(with_names, len(self.pages))
        return {
            index: max([share * (weights[name] + near[name]) for name, share in shares.items()])
            for index, shares in introduced.items()
        }

    def _answers(self, best: int, pages: Container[int]) -> dict[int, float]:
        """Return how much some pages have of what the question asks and the page `best` lacks."""
        lacks = self._stems.keys() - self._stem_counts[best].keys()
        counts = [
            {stem: num for stem, num in own.items() if stem in lacks} if index in pages else {}
            for index, own in enumerate(self._stem_counts)
        ]
        weights = {stem: rarity(self._num_with_stem[stem], len(self.pages)) for stem in lacks}
        scores = bm25_scores(counts, self._lengths, weights)
        return {index: score for index, score in enumerate(scores) if index in pages}

    def _names(self, words: frozenset[str]) -> frozenset[str]:
        """Return those of some words that stand in no passage in lower case. Scripts without capitals have no lower
        case either."""
        for page in self.pages:
            for passage in page:
                if not passage.lower.isdisjoint(words):
                    words = frozenset([word for word in words if word not in passage.lower])
        return words

    def _asked_near(self, page: int, words: frozenset[str]) -> float:
        """Return how much of what the question asks stands in one sentence of a page with one of `words`."""
        most = 0.0
        if not self._asked.keys().isdisjoint(self._stem_counts[page]):
            for passage in self.pages[page]:
                numbers = {number for word in words for number in passage.sentences_with.get(word, ())}
                for number in numbers:
                    stems = passage.sentences[number].stems
                    if not stems.isdisjoint(self._asked):
                        most = max(most, _weight(self._asked, stems))
        return most

    def _head(self, page: int) -> Mapping[str, int]:
        """Return the words of a page's first sentence."""
        return self.pages[page][0].sentences[0].places

    @cached_property
    def _lengths(self) -> list[int]:
        return [page[0].length if len(page) == 1 else sum([own.length for own in page]) for page in self.pages]

    @cached_property
    def _counts(self) -> list[dict[str, int]]:
        """Return how often each page has each of the question's words that it has at all."""
        asked = frozenset(self.question)
        counts = []
        for page in self.pages:
            own: dict[str, int] = {}
            for passage in page:
                kept = passage.counts
                for word in asked & passage.words:
                    own[word] = own.get(word, 0) + kept[word]
            counts.append(own)
        return counts

    @cached_property
    def _stem_counts(self) -> list[dict[str, int]]:
        """Return the same for the beginnings of the question's words."""
        asked = frozenset(stems_of(self.question))
        counts = []
        for page in self.pages:
            own: dict[str, int] = {}
            for passage in page:
                kept = passage.stem_counts
                for stem in asked & passage.stems:
                    own[stem] = own.get(stem, 0) + kept[stem]
            counts.append(own)
        return counts

    @cached_property
    def _weights(self) -> dict[str, float]:
        """Return the weights of those of the question's words that the pages have."""
        return rarities(self._counts, len(self.pages))

    @cached_property
    def _num_with_stem(self) -> Counter[str]:
        return Counter(chain.from_iterable(self._stem_counts))

    @cached_property
    def _question_names(self) -> frozenset[str]:
        """Return the names among the question's words that the pages have."""
        return self._names(frozenset(chain.from_iterable(self._counts)))

    @cached_property
    def _asked(self) -> dict[str, float]:
        """Return `_stems` without the names: not whom or what the question is about, but what it asks."""
        asked = stems_of(set(self.question) - self._question_names)
        return {stem: weight for stem, weight in self._rare_stems.items() if stem in asked}

    @cached_property
    def _stems(self) -> dict[str, float]:
        """Return the beginnings of the question's words, with their weights in `match`."""
        num_with, num = self._num_with_stem, len(self.pages)
        stems = stems_of(self.question)
        return {stem: rarity(num_with[stem], num) if 2 * num_with[stem] <= num else 0.0 for stem in stems}

    @cached_property
    def _rare_stems(self) -> dict[str, float]:
        return {stem: weight for stem, weight in self._stems.items() if weight}

    @cached_property
    def _matches(self) -> dict[frozenset[str], float]:
        return {}

    @cached_property
    def _names_of(self) -> dict[int, frozenset[str]]:
        return {}


def _weight(weights: Mapping[str, float], stems: frozenset[str]) -> float:
    """Return the weight of those stems that have one."""
    return fsum([weights[stem] for stem in weights.keys() & stems])
