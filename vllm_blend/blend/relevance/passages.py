"""The passages of one prompt, and which of their sentences matter for its question, in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property

from vllm_blend.blend.relevance.pages import Link, PageWords, group_pages
from vllm_blend.blend.relevance.words import PassageWords, Sentence

Span = tuple[int, int]  # positions: start, stop
_Placed = tuple[Span, Sentence]  # a sentence, and where it stands in the prompt
CLEAR_GAP = 0.1  # the share by which the best page's score must be above the next one's
MOST_ALIKE = 3  # pages that the words may find almost equally
WIDE_GAP = 0.5  # the share by which the best score must then be above those of all other pages
RANK_OFFSET = 60  # of reciprocal rank fusion: how little the first ranks stand out
LINKED_PAGES = 2  # which the best page leads to, and of which sentences are computed before its own last ones
BEST_MATCHES = 2  # sentences of a page that a question about two pages is likely to need, besides the first


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
        best = max(range(len(scores)), key=lambda page: scores[page])
        links = [link.score for link in self._links(best)]
        if given:
            fused = _fuse([*given, links])
            return sorted(range(len(scores)), key=lambda page: (page != best, -fused[page])), set()
        alike = {page for page, score in enumerate(scores) if score > (1 - CLEAR_GAP) * scores[best]}
        ranked = sorted(
            range(len(scores)), key=lambda page: (page != best, page not in alike, -links[page], -scores[page])
        )
        return ranked, alike - {best}

    def asks_for_one_page(self) -> bool:
        """Return whether the words find one page, and the question seems to ask for no other: the page that
        comes next has no word of it which the first lacks. Scores that the prompt was given say nothing about that."""
        if self.is_ranked or self.relevance:
            return False
        ranked, alike = self._ranking
        return ranked is not None and not alike and not self._links(ranked[0])[ranked[1]].is_asked_for

    def ranked_sentences(self) -> Iterator[list[Span]] | None:
        """Return the positions of all sentences in groups, the most relevant first; None if no signal tells pages
        apart.

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
            return iter([[(self.bounds[0][0], self.bounds[-1][1])]])
        ranked = self.ranked_pages()
        return None if ranked is None else self._groups(ranked)

    def _groups(self, ranked: Sequence[int]) -> Iterator[list[Span]]:
        first, second = ranked[:2]
        links = self._links(first)
        alike = self._ranking[1]
        linked = [page for page in ranked[1 : 1 + LINKED_PAGES] if links[page].score > 0 or page in alike]
        own = self._sentences(first)
        sentences = own[:1] + self._best_matches(own)
        if links[second].is_asked_for:
            other = self._sentences(second)
            sentences += [*_with_words(own, links[second]), *other[:1], *self._best_matches(other)]
            sentences += self._named(second)
        else:
            for page in linked:
                sentences += [*_with_words(own, links[page]), *self._sentences(page)[:1]]
        sentences += self._named(first)
        for page in linked:
            sentences += [*self._sentences(page)[:1], *self._named(page)]
        sentences += self._by_match(own)
        key = dict.fromkeys(span for span, _ in sentences)
        yield list(key)
        for page in ranked[1:]:
            yield [span for span, _ in self._sentences(page) if span not in key]

    @cached_property
    def _links(self) -> Callable[[int], list[Link]]:
        return cache(self._words.links)

    @cached_property
    def _words(self) -> PageWords:
        passages, question = self.read_words()
        return PageWords([[passages[index] for index in page] for page in self.pages], question)

    @cached_property
    def _sentences(self) -> Callable[[int], list[_Placed]]:
        """Return a function of a page: where its sentences stand, and what they say."""
        return cache(self._place_sentences)

    def _place_sentences(self, page: int) -> list[_Placed]:
        return [
            ((self.bounds[index][0] + sentence.start, self.bounds[index][0] + sentence.stop), sentence)
            for index, passage in zip(self.pages[page], self._words.pages[page], strict=True)
            for sentence in passage.sentences
        ]

    def _named(self, page: int) -> list[_Placed]:
        """Return the sentences of a page that have names or numbers, those first that match the question best."""
        names = self._words.names(page)
        return self._by_match(each for each in self._sentences(page) if not names.isdisjoint(each[1].places))

    def _best_matches(self, sentences: Sequence[_Placed]) -> list[_Placed]:
        """Return those of a page's sentences, but for the first, that match the question best."""
        return self._by_match(each for each in sentences[1:] if self._words.match(each[1]) > 0)[:BEST_MATCHES]

    def _by_match(self, sentences: Iterable[_Placed]) -> list[_Placed]:
        return sorted(sentences, key=lambda each: -self._words.match(each[1]))


def _with_words(sentences: Sequence[_Placed], link: Link) -> list[_Placed]:
    """Return the sentences that have words of a link."""
    return [each for each in sentences if not link.words.isdisjoint(each[1].places)]


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
