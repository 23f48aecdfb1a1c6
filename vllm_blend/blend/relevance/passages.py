"""The passages of one prompt, and which of their sentences matter for its question, in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

import numpy as np

from vllm_blend.blend.relevance.pages import Links, PageWords, group_pages
from vllm_blend.blend.relevance.words import PassageWords

Span = tuple[int, int]  # positions: start, stop
CLEAR_GAP = 0.1  # the share by which the best page's score must be above the next one's
MOST_ALIKE = 3  # pages that the words may find almost equally
WIDE_GAP = 0.5  # the share by which the best score must then be above those of all other pages
RANK_OFFSET = 60  # of reciprocal rank fusion: how little the first ranks stand out
LINKED_PAGES = 2  # which the best page leads to, and of which sentences are computed before its own last ones
BEST_MATCHES = 2  # sentences of a page that a question about two pages is likely to need, besides the first


@dataclass(frozen=True)
class RankedSpans:
    """Spans of positions, the most relevant first, in groups, none of which is empty."""

    starts: np.ndarray  # [spans] int64
    stops: np.ndarray  # [spans] int64
    ends: Sequence[int]  # how many spans there are up to the end of each group

    def __iter__(self) -> Iterator[list[Span]]:
        """Yield the spans of each group."""
        spans = list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))
        return (spans[first:end] for first, end in zip([0, *self.ends], self.ends, strict=False))


@dataclass(frozen=True)
class PromptPassages:
    """The passages of a prompt, in their order.

    `bounds` are their (start, stop) positions. `continues` has, for each, the passage before it that it continues on
    its page, or None; empty if the prompt names no pages. `relevance` has the scores that the prompt was given: a tuple
    per signal with a score per passage, larger is more relevant. `read_words` returns the words of all passages, and
    the different words of the question. `is_ranked`: the passages stand in the order of their relevance.
    """

    bounds: tuple[Span, ...]
    continues: tuple[int | None, ...]
    relevance: tuple[tuple[float, ...], ...]
    read_words: Callable[[], tuple[Sequence[PassageWords], Sequence[str]]]
    is_ranked: bool = False

    @cached_property
    def pages(self) -> list[list[int]]:
        """Return the passages of each page."""
        return group_pages(len(self.bounds), self.continues)

    def ranked_pages(self) -> list[int] | None:
        """Return the pages, the most relevant first; None if no signal tells them apart.

        The first is that of the best given relevance (a page is as relevant as its best passage), or the one that the
        question's words find. If they find up to MOST_ALIKE pages almost equally, and others far less, these come
        first; if they find more, they have found none. (Of 450 questions about 150 plain worlds of the development
        split, 4 families each, 2 found none, and of 450 about wild ones 54. `tests/blend/relevance/test_worlds.py`
        looks at some of them.) Pages that the first is linked to come next, or, with a given relevance, the pages by
        both: rankings are fused by reciprocal rank (Cormack et al., SIGIR 2009).
        """
        return self._ranking[0]

    @cached_property
    def _ranking(self) -> tuple[list[int] | None, Set[int]]:
        """Return the ranked pages, and which of them the words find almost equally."""
        if len(self.pages) < 2:
            return None, set()
        given = [[max(signal[index] for index in page) for page in self.pages] for signal in self.relevance]
        scores = _fuse(given) if given else self._words.scores()
        if min(scores) == max(scores) or not (given or _is_clear(scores)):
            return None, set()
        best = scores.index(max(scores))
        links = self._links(best).scores
        if given:
            fused = _fuse([*given, links])
            return _order(best, fused), set()
        alike = {page for page, score in enumerate(scores) if score > (1 - CLEAR_GAP) * scores[best]}
        return _order(best, [float(page in alike) for page in range(len(scores))], links, scores), alike - {best}

    def asks_for_one_page(self) -> bool:
        """Return whether the words find one page, and the question seems to ask for no other: the page that
        comes next has no word of it which the first lacks. Scores that the prompt was given say nothing about that."""
        if self.is_ranked or self.relevance:
            return False
        ranked, alike = self._ranking
        return ranked is not None and not alike and ranked[1] not in self._links(ranked[0]).asked_for

    def ranked_sentences(self) -> Iterator[RankedSpans] | None:
        """Yield the positions of all sentences, the most relevant first: one group, and then all others. Return None if
        no signal tells pages apart.

        A page's first sentence says what it is about, and so comes first. If the question seems to ask for the second
        page, since that has words of it which the first page lacks, the sentences that such a question needs of both
        pages follow: those that match it best, those that name what links the pages, and all of the second page with
        names or numbers, as an answer is likely to be one. Else it is the first page's sentences that match best, and
        for each of the LINKED_PAGES that it is linked to, or that the words find as well, what links them and how they
        begin. Then come the sentences with names or numbers of the first page and of the linked ones, and the rest of
        the first page; all others follow page by page. Passages that are ranked are computed from the first on: behind
        what is exact, they become exact.
        """
        if self.is_ranked:
            return iter([RankedSpans(np.array([self.bounds[0][0]]), np.array([self.bounds[-1][1]]), (1,))])
        ranked = self.ranked_pages()
        return None if ranked is None else self._rank_sentences(ranked)

    def _rank_sentences(self, ranked: Sequence[int]) -> Iterator[RankedSpans]:
        """Yield the sentences of the first group, and then the others page by page, if a caller goes on to them."""
        key_starts, key_stops = np.array(self._key_sentences(ranked)).T
        yield RankedSpans(key_starts, key_stops, (len(key_starts),))
        others = [self.pages[page] for page in ranked[1:]]
        starts, stops, num_before = self._place(list(chain.from_iterable(others)))
        is_key = np.zeros(self.bounds[-1][1] + 1, bool)
        is_key[key_starts] = True
        is_other = ~is_key[starts]
        page_ends = num_before[np.array(list(map(len, others))).cumsum() - 1]
        ends = dict.fromkeys(is_other.cumsum()[page_ends - 1].tolist())
        ends.pop(0, None)  # no group is empty
        if ends:
            yield RankedSpans(starts[is_other], stops[is_other], list(ends))

    def _key_sentences(self, ranked: Sequence[int]) -> list[Span]:
        """Return the sentences that come before all others, each once."""
        first, second = ranked[:2]
        links = self._links(first)
        alike = self._ranking[1]
        linked = [page for page in ranked[1 : 1 + LINKED_PAGES] if links.scores[page] > 0 or page in alike]
        own = self._sentences(first)
        sentences = own[:1] + self._best_matches(first)
        if second in links.asked_for:
            sentences += self._with_words(first, links.words.get(second, ()))
            sentences += self._sentences(second)[:1] + self._best_matches(second) + self._named(second)
        else:
            for page in linked:
                sentences += self._with_words(first, links.words.get(page, ())) + self._sentences(page)[:1]
        sentences += self._named(first)
        for page in linked:
            sentences += self._sentences(page)[:1] + self._named(page)
        sentences += self._by_match(first, range(len(own)))
        return list(dict.fromkeys(sentences))

    @cached_property
    def _links(self) -> Callable[[int], Links]:
        return cache(self._words.links)

    @cached_property
    def _words(self) -> PageWords:
        passages, question = self._read
        return PageWords([[passages[index] for index in page] for page in self.pages], question)

    @cached_property
    def _read(self) -> tuple[Sequence[PassageWords], Sequence[str]]:
        return self.read_words()

    @cached_property
    def _sentences(self) -> Callable[[int], list[Span]]:
        """Return a function of a page: where its sentences stand."""
        return cache(self._place_page)

    @cached_property
    def _matches(self) -> Callable[[int], list[float]]:
        """Return a function of a page: how well its sentences match the question."""
        return cache(self._words.matches)

    def _place_page(self, page: int) -> list[Span]:
        spans: list[Span] = []
        for index in self.pages[page]:
            start = self.bounds[index][0]
            stops = (start + self._read[0][index].stops).tolist()
            spans += zip([start, *stops[:-1]], stops, strict=True)
        return spans

    def _place(self, passages: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the sentences of some passages start and stop, and how many there are up to the end of each
        passage."""
        own = [self._read[0][index].stops for index in passages]
        begins = np.array([self.bounds[index][0] for index in passages])
        sizes = np.array(list(map(len, own)))
        num_before = sizes.cumsum()
        stops = np.concatenate(own) + begins.repeat(sizes)
        starts = np.empty_like(stops)
        starts[1:] = stops[:-1]
        starts[num_before - sizes] = begins
        return starts, stops, num_before

    def _named(self, page: int) -> list[Span]:
        """Return the sentences of a page that have names or numbers, those first that match the question best."""
        return self._by_match(page, self._words.with_names(page))

    def _best_matches(self, page: int) -> list[Span]:
        """Return those of a page's sentences, but for the first, that match the question best."""
        matches = self._matches(page)
        found = [index for index, match in enumerate(matches) if match > 0 and index]
        return self._by_match(page, found)[:BEST_MATCHES]

    def _with_words(self, page: int, numbers: Sequence[int]) -> list[Span]:
        """Return the sentences of a page that have words with these numbers."""
        spans = self._sentences(page)
        return [spans[index] for index in self._words.with_words(page, numbers)]

    def _by_match(self, page: int, sentences: Iterable[int]) -> list[Span]:
        spans, matches = self._sentences(page), self._matches(page)
        return [spans[index] for index in sorted(sentences, key=matches.__getitem__, reverse=True)]


def _order(best: int, *scores: Sequence[float]) -> list[int]:
    """Return the page `best` and then all others, those first that have more of the first of `scores`, or of the ones
    that follow if they have as much of it."""
    order: list[int] = np.lexsort([-np.array(each) for each in reversed(scores)]).tolist()
    order.remove(best)
    return [best, *order]


def _is_clear(scores: Sequence[float]) -> bool:
    """Return whether the best score is clearly above all others, or the MOST_ALIKE best are far above the others."""
    best, second, *others = sorted(scores, reverse=True)
    next_one = max(others[MOST_ALIKE - 2 :], default=0.0)
    return best - second >= CLEAR_GAP * best or best - next_one >= WIDE_GAP * best


def _fuse(signals: Sequence[Sequence[float]]) -> list[float]:
    """Return the reciprocal rank fusion of several scores of the same pages. Equal scores have the same rank."""
    fused = [0.0] * len(signals[0])
    for scores in signals:
        rank_of = {score: rank for rank, score in reversed(list(enumerate(sorted(scores, reverse=True), 1)))}
        for index, score in enumerate(scores):
            fused[index] += 1 / (RANK_OFFSET + rank_of[score])
    return fused
