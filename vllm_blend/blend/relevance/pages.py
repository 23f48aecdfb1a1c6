"""The passages of one prompt as pages, and how much each page and each sentence matters for the question, by its words.

A step waits for this. So words are numbers, NumPy looks for those of the question in all passages at once, and what
follows looks at the few places where they are. Sums are exact before they are rounded, so that what is equally relevant
is so in whatever order its words come.

The constants were chosen on worlds of the development split; docs/selection.md says what each part is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import fsum

import numpy as np

from vllm_blend.blend.relevance.bm25 import bm25_scores, length_norms, rarities, row_sums
from vllm_blend.blend.relevance.numbers import STEM_LETTERS, Groups, Numbering, mark, places_of
from vllm_blend.blend.relevance.words import PassageWords, WeighedWords

LATER_SHARE = 0.6  # of a page whose first sentence has a name, but later than another page's has it


def group_pages(num_passages: int, continues: Sequence[int | None]) -> list[list[int]]:
    """Return the passages of each page, ascending, and the pages in the order of their first passages. `continues` has,
    for each passage, an earlier one that it continues on its page, or None; if it is empty, each passage is a page."""
    if set(continues) <= {None}:
        return [[index] for index in range(num_passages)]
    pages: list[list[int]] = []
    page_of: list[list[int]] = []
    for index in range(num_passages):
        before = continues[index]
        page: list[int] = [] if before is None else page_of[before]
        if before is None:
            pages.append(page)
        page.append(index)
        page_of.append(page)
    return pages


@dataclass(frozen=True)
class Links:
    """How a page leads to each page: how strongly (0 for not at all), by which of its words (their numbers), and
    which pages have a word of the question that it lacks."""

    scores: list[float]
    words: Mapping[int, Sequence[int]]
    asked_for: frozenset[int]


@dataclass(frozen=True)
class _Counts:
    """How often pages have some words, or words that begin alike."""

    table: np.ndarray  # [pages, words] float64
    num_with: list[int]  # how many pages have each
    weights: np.ndarray  # [words] float64: how rare each is


@dataclass(frozen=True)
class PageWords:
    """The words of a prompt's pages, passage by passage, and the different words of its question."""

    pages: Sequence[Sequence[PassageWords]]
    question: Sequence[str]

    def scores(self) -> list[float]:
        """Return how much each page is about the question: BM25 over whole pages, and once more the weight of each
        word of the question in a page's first sentence. A page that begins with a name is about it, while others only
        mention it."""
        weights = self._words.weights
        scores = bm25_scores(self._words.table, self._norms, weights)
        pages = np.flatnonzero(self._in_heads.any(axis=1))
        in_heads = row_sums(self._in_heads[pages] * weights)
        for page, weight in zip(pages.tolist(), in_heads, strict=True):
            scores[page] += weight
        return scores

    def links(self, best: int) -> Links:
        """Return how the page `best` leads to each page.

        A question such as "In which country was Ada born?" needs a second page, which the first one names. Each name on
        `best` leads to the page whose first sentence has it soonest, and less to others that have it there. A page that
        mentions `best` is linked as well: it has a name of the question that stands in the first sentence of `best`.
        One that has only a part of the name, such as a surname, counts by the square of that part's weight. Of linked
        pages, those matter most that a rare name links, that are linked by a sentence with other words of the question
        ("born"), and that have what the question asks and `best` lacks.
        """
        scores, introduced = self._leads(best)
        for page, mention in self._mentions(best).items():
            scores[page] = scores.get(page, 0.0) + mention
        strengths, asked_for = [0.0] * len(self.pages), set()
        for (page, score), answer in zip(scores.items(), self._answers(best, list(scores)), strict=True):
            strengths[page] = score + answer
            if answer > 0:
                asked_for.add(page)
        return Links(strengths, introduced, frozenset(asked_for))

    def matches(self, page: int) -> list[float]:
        """Return for each sentence of a page the weight of the question's words that begin as words of it do. Words of
        most pages tell no sentence apart and count nothing."""
        return self._weigh(page, list(self._rare_stems.values()))

    def with_names(self, page: int) -> list[int]:
        """Return the numbers of a page's sentences that have names or numbers: words that do not only begin sentences,
        and that stand in no passage in lower case."""
        names = np.concatenate([own.names for own in self.pages[page]])
        is_name = mark(names[~self._is_lower[names]], len(self._numbering))
        found: list[int] = []
        first = 0
        for own in self.pages[page]:
            words, sentences = own.capitals
            has_name = mark(sentences[is_name[words]], len(own.stops))
            found += (first + has_name.nonzero()[0]).tolist()
            first += len(own.stops)
        return found

    def with_words(self, page: int, numbers: Iterable[int]) -> list[int]:
        """Return the numbers of a page's sentences that have one of some words."""
        found: list[int] = []
        first = 0
        for own in self.pages[page]:
            found += [first + sentence for sentence in sorted(own.sentences_with_any(numbers))]
            first += len(own.stops)
        return found

    def _leads(self, best: int) -> tuple[dict[int, float], dict[int, list[int]]]:
        """Return how strongly the names on the page `best` lead to the pages that introduce them in their first
        sentences, and by which names. A name leads strongest to the page whose first sentence has it soonest."""
        is_own = mark(np.concatenate([own.words[0] for own in self.pages[best]]), len(self._numbering))
        is_own[self._asked_numbers] = False
        sizes = np.array([len(page[0].head) for page in self.pages])
        heads = Groups(np.concatenate([page[0].head for page in self.pages]), sizes.cumsum())
        places, pages = heads.find(is_own)
        places, pages = places[pages != best], pages[pages != best]
        names = heads.numbers[places]
        are_names = ~self._is_lower[names]
        if are_names.any():  # else people write all in lower case, too
            places, pages, names = places[are_names], pages[are_names], names[are_names]
        behind = places - heads.starts[pages]  # how many words precede it in its sentence
        soonest: dict[int, tuple[int, int]] = {}
        found = list(zip(names.tolist(), behind.tolist(), pages.tolist(), strict=True))
        for name, place, page in found:
            if name not in soonest or place < soonest[name][0]:
                soonest[name] = place, page
        different = list(soonest)
        near = self._asked_near_each(best, different)
        strengths = {
            name: weight + near.get(name, 0.0)
            for name, weight in zip(different, self._rarities(different), strict=True)
        }
        leads: dict[int, float] = {}
        introduced: dict[int, list[int]] = {}
        for name, _, page in found:
            share = 1.0 if soonest[name][1] == page else LATER_SHARE
            leads[page] = max(leads.get(page, 0.0), share * strengths[name])
            introduced.setdefault(page, []).append(name)
        return leads, introduced

    def _mentions(self, best: int) -> dict[int, float]:
        """Return how strongly other pages mention the page `best`."""
        about = self._in_heads[best].nonzero()[0].tolist()
        named = [word for word in about if self._are_names[word]] or about
        weights = self._words.weights[named]
        own = self._words.table[:, named] > 0
        own[best] = False
        pages = np.flatnonzero(own.any(axis=1))
        whole = fsum(weights.tolist())
        numbers = [self._asked_numbers[word] for word in named]
        mentions: dict[int, float] = {}
        for page, part in zip(pages.tolist(), row_sums(own[pages] * weights), strict=True):
            mentions[page] = (part / whole) ** 2 * (part + self._asked_near(page, numbers))
        return mentions

    def _answers(self, best: int, pages: list[int]) -> list[float]:
        """Return how much some pages have of what the question asks and the page `best` lacks."""
        stems = self._stems
        lacks = (stems.table[best] == 0).nonzero()[0]
        return bm25_scores(stems.table[pages][:, lacks], self._norms[pages], stems.weights[lacks])

    def _rarities(self, names: Sequence[int]) -> list[float]:
        """Return the weights of words by the number of pages that have them."""
        size = len(self._numbering)
        words, _ = self._all
        places, passages = words.find(mark(names, size))
        has = np.zeros((len(self.pages), len(names)), bool)
        has[self._page_of[passages], places_of(names, size)[words.numbers[places]]] = True
        return rarities(has.sum(axis=0).tolist(), len(self.pages))

    def _asked_near_each(self, page: int, names: Sequence[int]) -> dict[int, float]:
        """Return how much of what the question asks stands in one sentence of a page with each of some words."""
        near: dict[int, float] = {}
        if self._has_asked[page]:
            weights = self._weigh(page, self._what_is_asked)
            for name in names:
                near[name] = max([weights[sentence] for sentence in self.with_words(page, (name,))], default=0.0)
        return near

    def _asked_near(self, page: int, names: Sequence[int]) -> float:
        """Return how much of what the question asks stands in one sentence of a page with one of some words."""
        most = 0.0
        if self._has_asked[page]:
            for own in self.pages[page]:
                found = own.weigh_sentences(self._what_is_asked, own.sentences_with_any(names))
                most = max(most, *found.values()) if found else most
        return most

    def _weigh(self, page: int, stems: Sequence[WeighedWords]) -> list[float]:
        """Return the weight that each sentence of a page has by the stems in it."""
        weights: list[float] = []
        for own in self.pages[page]:
            found = own.weigh_sentences(stems)
            weights += [found.get(sentence, 0.0) for sentence in range(len(own.stops))]
        return weights

    @cached_property
    def _numbering(self) -> Numbering:
        return self.pages[0][0].numbering

    @cached_property
    def _passages(self) -> list[PassageWords]:
        return list(chain.from_iterable(self.pages))

    @cached_property
    def _page_of(self) -> np.ndarray:
        """Return the page of each passage."""
        return np.arange(len(self.pages)).repeat(list(map(len, self.pages)))

    @cached_property
    def _all(self) -> tuple[Groups, np.ndarray]:
        """Return the different words of all passages, and their counts."""
        tables = [own.words for own in self._passages]
        numbers, counts = np.concatenate(tables, axis=1)
        return Groups(numbers, np.array([table.shape[1] for table in tables]).cumsum()), counts

    @cached_property
    def _norms(self) -> np.ndarray:
        return length_norms(np.bincount(self._page_of, [own.length for own in self._passages]))

    @cached_property
    def _is_lower(self) -> np.ndarray:
        """Return which words stand in lower case in some passage: they are no names. Scripts without capitals have no
        lower case either."""
        return mark(np.concatenate([own.lower for own in self._passages]), len(self._numbering))

    @cached_property
    def _asked_numbers(self) -> list[int]:
        """Return the numbers of the question's words that have one."""
        numbering = self._numbering
        return [numbering[word] for word in self.question if word in numbering]

    @cached_property
    def _asked_stems(self) -> dict[str, int]:
        """Return those beginnings of the question's words that have a number, and their numbers."""
        stems = self._numbering.stems
        return {stem: stems[stem] for stem in [word[:STEM_LETTERS] for word in self.question] if stem in stems}

    @cached_property
    def _hits(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return where the pages have words that begin as the question's do: pages, numbers of words, which of
        `_asked_stems` they begin with, and counts."""
        words, counts = self._all
        asked, size = list(self._asked_stems.values()), len(self._numbering.stems)
        stems = self._numbering.stems_of(words.numbers)
        places, passages = Groups(stems, words.stops).find(mark(asked, size))
        counts, columns = counts[places], places_of(asked, size)[stems[places]]
        if len(self._passages) > len(self.pages):  # a passage that continues another does not begin its page
            counts &= np.where(np.diff(self._page_of, prepend=-1), -1, -2)[passages]
        return self._page_of[passages], words.numbers[places], columns, counts

    @cached_property
    def _words(self) -> _Counts:
        """Return what the pages have of the question's words."""
        pages, columns, counts = self._word_hits
        return self._count(pages, columns, counts >> 1, len(self._asked_numbers))

    @cached_property
    def _in_heads(self) -> np.ndarray:
        """Return which of the question's words each page's first sentence has, [pages, words] bool."""
        pages, columns, counts = self._word_hits
        in_heads = np.zeros(self._words.table.shape, bool)
        begins = (counts & 1).nonzero()[0]
        in_heads[pages[begins], columns[begins]] = True
        return in_heads

    @cached_property
    def _word_hits(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `_hits` of the question's own words, which are columns of tables."""
        pages, numbers, _, counts = self._hits
        asked, size = self._asked_numbers, len(self._numbering)
        own = mark(asked, size)[numbers].nonzero()[0]
        return pages[own], places_of(asked, size)[numbers[own]], counts[own]

    @cached_property
    def _stems(self) -> _Counts:
        """Return what the pages have of the beginnings of the question's words."""
        pages, _, columns, counts = self._hits
        return self._count(pages, columns, counts >> 1, len(self._asked_stems))

    def _count(self, pages: np.ndarray, columns: np.ndarray, counts: np.ndarray, width: int) -> _Counts:
        num_pages = len(self.pages)
        table = np.bincount(pages * width + columns, counts, num_pages * width).reshape(num_pages, width)
        num_with = (table > 0).sum(axis=0).tolist()
        return _Counts(table, num_with, np.array(rarities(num_with, num_pages)))

    @cached_property
    def _are_names(self) -> list[bool]:
        """Return which of the question's words are names that the pages have."""
        is_lower = self._is_lower[self._asked_numbers].tolist()
        return [num > 0 and not lower for num, lower in zip(self._words.num_with, is_lower, strict=True)]

    @cached_property
    def _rare_stems(self) -> dict[str, WeighedWords]:
        """Return the beginnings of the question's words that not most pages have, with their weights in `matches`."""
        _, numbers, columns, _ = self._hits
        num_with, weights, rare = self._stems.num_with, self._stems.weights.tolist(), {}
        for column, stem in enumerate(self._asked_stems):
            if 0 < 2 * num_with[column] <= len(self.pages):
                own = set(numbers[columns == column].tolist())
                rare[stem] = WeighedWords(weights[column], sorted(own))
        return rare

    @cached_property
    def _what_is_asked(self) -> list[WeighedWords]:
        """Return the same without the names: not whom or what the question is about, but what it asks."""
        return [self._rare_stems[stem] for stem in self._stems_asked if stem in self._rare_stems]

    @cached_property
    def _stems_asked(self) -> set[str]:
        known = [word for word in self.question if word in self._numbering]
        names = {word for word, is_name in zip(known, self._are_names, strict=True) if is_name}
        return {word[:STEM_LETTERS] for word in self.question if word not in names}

    @cached_property
    def _has_asked(self) -> list[bool]:
        """Return which pages have any of what the question asks."""
        is_asked = [float(stem in self._stems_asked and stem in self._rare_stems) for stem in self._asked_stems]
        has: list[bool] = (self._stems.table @ np.array(is_asked) > 0).tolist()
        return has
