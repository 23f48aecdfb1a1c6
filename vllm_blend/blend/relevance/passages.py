"""The passages of one prompt, and which of their sentences matter for its question, in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from vllm_blend.blend.relevance.pages import Link, PageWords, group_pages
from vllm_blend.blend.relevance.words import PassageWords, Sentence

Span = tuple[int, int]  # positions: start, stop
CLEAR_GAP = 0.1  # the share by which the best page's score must be above the next one's
WIDE_GAP = 0.5  # the same for the third one's score, if the first two are alike
RANK_OFFSET = 60  # of reciprocal rank fusion: how little the first ranks stand out
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
        question's words find. If they find two pages almost equally, and others far less, the second is the other one;
        if they find more than two, they have found none. (Of 300 questions about 100 plain worlds of the development
        split, 8 families each, 98% were clear, and all but one of those right; without the name of their subject 21%
        were clear. About wild worlds 84% were clear, and for 84% of those the page was one that the question needs.
        `tests/blend/relevance/test_worlds.py` looks at some of them.) Pages that the first is linked to come next, or,
        with a given relevance, the pages by both: rankings are fused by reciprocal rank (Cormack et al., SIGIR 2009).
        """
        if len(self.pages) < 2:
            return None
        given = [[max(signal[index] for index in page) for page in self.pages] for signal in self.relevance]
        scores = _fuse(given) if given else self._words.scores()
        if min(scores) == max(scores) or not (given or _is_clear(scores)):
            return None
        best = max(range(len(scores)), key=lambda page: scores[page])
        links = [link.score for link in self._links(best)]
        if given:
            fused = _fuse([*given, links])
            return sorted(range(len(scores)), key=lambda page: (page != best, -fused[page]))
        rivals = {page for page, score in enumerate(scores) if score > (1 - CLEAR_GAP) * scores[best]}
        return sorted(
            range(len(scores)), key=lambda page: (page != best, page not in rivals, -links[page], -scores[page])
        )

    def ranked_sentences(self, only_needed: bool = False) -> Iterator[list[Span]] | None:
        """Return the positions of all sentences in groups, the most relevant first; None if no signal tells pages
        apart. With `only_needed`, those of the first page alone, unless the question seems to ask for another.

        A page's first sentence says what it is about, and so comes first. If the question seems to ask for the second
        page, since that has words of it which the first page lacks, the sentences that such a question needs of both
        pages come next: those that match it best, those that link the pages, and all of the second page that have names
        or numbers. Then follow, of the first page and of a second one that is linked to it, all sentences with names or
        numbers, as an answer is likely to be one, and last the rest of the first page. In text without names the first
        page is computed whole before that. All other sentences follow page by page. Passages that are ranked are
        computed from the first on: behind what is exact, they become exact.
        """
        if self.is_ranked:
            return iter([[(self.bounds[0][0], self.bounds[-1][1])]])
        ranked = self.ranked_pages()
        return None if ranked is None else self._groups(ranked, only_needed)

    def _groups(self, ranked: Sequence[int], only_needed: bool) -> Iterator[list[Span]]:
        first, second = ranked[:2]
        link = self._links(first)[second]
        own, other = self._sentences(first), self._sentences(second)
        sentences = own[:1]
        if link.is_asked_for:
            sentences += self._best_matches(own)
            sentences += [each for each in own if not link.words.isdisjoint(each[1].places)]
            sentences += [*other[:1], *self._best_matches(other), *self._named(second)]
        sentences += self._named(first)
        named = self._named(second)
        if link.score > 0 and named and not only_needed:
            sentences += [*other[:1], *named]
        sentences += self._by_match(own)
        key = dict.fromkeys(span for span, _ in sentences)
        yield list(key)
        if link.is_asked_for or not only_needed:
            for page in ranked[1:]:
                yield [span for span, _ in self._sentences(page) if span not in key]

    @cached_property
    def _links(self) -> Callable[[int], list[Link]]:
        return cache(self._words.links)

    @cached_property
    def _words(self) -> PageWords:
        passages, question = self.read_words()
        return PageWords([[passages[index] for index in page] for page in self.pages], question)

    def _sentences(self, page: int) -> list[tuple[Span, Sentence]]:
        """Return where the sentences of a page stand, and what they say."""
        return [
            ((self.bounds[index][0] + sentence.start, self.bounds[index][0] + sentence.stop), sentence)
            for index, passage in zip(self.pages[page], self._words.pages[page], strict=True)
            for sentence in passage.sentences
        ]

    def _named(self, page: int) -> list[tuple[Span, Sentence]]:
        """Return the sentences of a page that have names or numbers, those first that match the question best."""
        names = self._words.names(page)
        return self._by_match(each for each in self._sentences(page) if not names.isdisjoint(each[1].places))

    def _best_matches(self, sentences: Sequence[tuple[Span, Sentence]]) -> list[tuple[Span, Sentence]]:
        """Return those of a page's sentences, but for the first, that match the question best."""
        return self._by_match(each for each in sentences[1:] if self._words.match(each[1]) > 0)[:BEST_MATCHES]

    def _by_match(self, sentences: Iterable[tuple[Span, Sentence]]) -> list[tuple[Span, Sentence]]:
        return sorted(sentences, key=lambda each: -self._words.match(each[1]))


def _is_clear(scores: Sequence[float]) -> bool:
    """Return whether the best score is clearly above all others, or the two best are far above the others."""
    best, second, *others = sorted(scores, reverse=True)
    return best - second >= CLEAR_GAP * best or best - max(others, default=0.0) >= WIDE_GAP * best


def _fuse(signals: Sequence[Sequence[float]]) -> list[float]:
    """Return the reciprocal rank fusion of several scores of the same pages. Equal scores have the same rank."""
    fused = [0.0] * len(signals[0])
    for scores in signals:
        rank_of = {score: rank for rank, score in reversed(list(enumerate(sorted(scores, reverse=True), 1)))}
        for index, score in enumerate(scores):
            fused[index] += 1 / (RANK_OFFSET + rank_of[score])
    return fused
