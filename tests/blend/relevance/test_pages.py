"""The words of pages: BM25 against a library, how much a page is about a question, and where it leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.blend.relevance.texts import (
    ADA,
    ADA_LATER,
    CONTINUES,
    KEJOUX,
    OTHER_CITY,
    PASSAGES,
    WESGRO,
    Link,
    links_of,
    page_words,
)
from vllm_blend.blend.relevance import pages as relevance_pages
from vllm_blend.blend.relevance.bm25 import bm25_scores, length_norms, rarities, rarity
from vllm_blend.blend.relevance.numbers import mark, places_of
from vllm_blend.blend.relevance.pages import LATER_SHARE, PageWords, group_pages

pytestmark = pytest.mark.cpu_only


@given(
    st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=12), min_size=1, max_size=8),
    st.lists(st.sampled_from("abcdefgx"), min_size=1, max_size=6, unique=True),
)
def test_bm25_is_the_librarys(texts: list[list[str]], question: list[str]) -> None:
    library = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    library.index(texts, show_progress=False)
    known = [word for word in question if word in library.vocab_dict]
    expected = library.get_scores(known) if known else np.zeros(len(texts))
    counts = np.array([[text.count(word) for word in question] for text in texts])
    weights = np.array(rarities((counts > 0).sum(axis=0), len(texts)))
    scores = bm25_scores(counts, length_norms(np.array(list(map(len, texts)))), weights)
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


def test_passages_are_grouped_by_the_page_that_they_continue() -> None:
    assert group_pages(3, ()) == [[0], [1], [2]]
    assert group_pages(6, (None, 0, None, 1, 2, None)) == [[0, 1, 3], [2, 4], [5]]
    assert group_pages(5, CONTINUES) == [[0], [1], [2, 3], [4]]


def test_it_does_not_matter_how_a_page_is_cut_into_passages() -> None:
    question = "Who founded Kejoux Works, and which river stands in Wesgro?"
    later = f"{ADA_LATER} She left Wesgro."  # a word of the question that both passages have
    cut = page_words([[KEJOUX], [ADA + " ", later], [WESGRO]], question)
    whole = page_words([[KEJOUX], [f"{ADA} {later}"], [WESGRO]], question)
    assert cut.scores() == whole.scores()
    assert [links_of(cut, best) for best in range(3)] == [links_of(whole, best) for best in range(3)]


def test_the_order_of_words_changes_no_rounding() -> None:
    """Sets of words have another order in each process, and what is equally relevant must stay so."""
    counts = {word: 1 + index % 3 for index, word in enumerate("abcdefghij")}
    texts = np.array([list(counts.values()), *np.tril(np.ones((9, 10)))])
    weights = np.array(rarities((texts > 0).sum(axis=0), len(texts)))
    norms = length_norms(np.full(len(texts), 20))
    assert bm25_scores(texts, norms, weights) == bm25_scores(texts[:, ::-1], norms, weights[::-1])


def test_a_page_that_begins_with_a_rare_word_goes_before_one_that_begins_with_common_ones() -> None:
    common = ["Where in the town is it? Nothing.", *["It is old. Where in the town, I forget."] * 4]
    about = "Bou lies far away. It is old, and so on, and so on, and so on."
    scores = page_words([[text] for text in [*common, about]], "Where is the town of Bou?").scores()
    assert scores.index(max(scores)) == 5


def test_pages_without_words_are_about_nothing() -> None:
    words = page_words([["..."], ["!?"]], "Where?")
    assert words.scores() == [0, 0] and links_of(words, 0) == [Link(), Link()]


def test_links_say_how_they_lead() -> None:
    question = "Where does the river at the birthplace of Ada Brix flow?"
    links = links_of(page_words([[text] for text in PASSAGES], question), 2)
    other, _, ada, _, wesgro = links
    assert ada == Link()
    assert wesgro.words >= {"wesgro"} and wesgro.is_asked_for  # it has the river, which Ada's page lacks
    assert wesgro.score > other.score


def test_a_page_is_not_asked_for_by_words_that_the_best_one_has() -> None:
    pages = [[KEJOUX], [ADA, ADA_LATER], [f"{WESGRO} The market is old."]]
    founder = links_of(page_words(pages, "Kejoux Works?"), 0)[1]
    assert founder.score > 0 and not founder.is_asked_for
    market = links_of(page_words(pages, "Whom did Ada Brix marry?"), 1)[2]  # "marry" is in her second passage
    assert market.score > 0 and not market.is_asked_for


def test_a_page_is_linked_by_a_name_at_the_beginning_of_the_best_or_by_other_words_than_the_questions() -> None:
    pages = [["Ada Brix sailed. She saw a river."], ["Brix Street: long."], ["Long river."], ["Nothing."]]
    _, street, river, _ = links_of(page_words(pages, "Which river did Ada Brix see?"), 0)
    share = rarity(2, 4) / (rarity(2, 4) + rarity(1, 4))  # it has her surname alone
    assert street.score == pytest.approx(share**2 * rarity(2, 4))
    assert street == Link(street.score)  # and no other word of hers
    assert river == Link()  # the question's word, which is not what the best page is about


def test_words_of_more_than_half_of_the_pages_tell_no_sentence_apart() -> None:
    texts = ["Some here.", "Some few.", "Some few.", "None."]
    words = page_words([[text] for text in texts], "Some few words")
    some, few = words.matches(0)[0], words.matches(1)[0]
    assert some == 0 and few == rarity(2, 4)


def test_the_other_city_is_not_linked_before_the_birthplace() -> None:
    scores = [link.score for link in links_of(page_words([[OTHER_CITY], [ADA], [WESGRO]], "Which river, Ada Brix?"), 1)]
    assert scores[2] > scores[0]


def test_common_words_lead_nowhere() -> None:
    """The other chemist is no part of the question. Where all is in lower case, every word may be a name."""
    pages = [[ADA], ["Ole Finn was a chemist. He was young."], [WESGRO]]
    _, chemist, wesgro = links_of(page_words(pages, "In which country was Ada Brix born?"), 0)
    assert chemist == Link() and wesgro.words == {"wesgro"}
    lowered = [[text.lower() for text in page] for page in pages]
    _, chemist, wesgro = links_of(page_words(lowered, "in which country was ada brix born?"), 0)
    assert chemist.words >= {"chemist"} and wesgro.words >= {"wesgro"}


@pytest.mark.parametrize(("question", "nearer"), [("Where was Ada Brix born?", 2), ("What did Ada Brix found?", 1)])
def test_names_in_the_sentence_that_the_question_asks_for_lead_further(question: str, nearer: int) -> None:
    scores = [
        link.score for link in links_of(page_words([[ADA, ADA_LATER], [KEJOUX], [WESGRO], ["Nil."]], question), 0)
    ]
    assert scores.index(max(scores)) == nearer


def test_a_page_that_has_a_name_later_is_linked_less() -> None:
    native = "Born in Wesgro in 1870, Ole Finn worked as a painter."
    _, finn, wesgro = links_of(page_words([[ADA], [f"A {native}"], [WESGRO]], "In which country was Ada Brix born?"), 0)
    assert finn.words == wesgro.words == {"wesgro"} and finn.score == LATER_SHARE * wesgro.score


def test_a_page_that_shares_a_surname_is_linked_less_than_one_that_has_the_whole_name() -> None:
    pages = [["Kejoux Works: clocks."], ["Lia Works: tiles. Founded late."], ["Ole Finn: Kejoux Works was his."]]
    _, namesake, founder = links_of(page_words(pages, "Who founded Kejoux Works?"), 0)
    assert 0 < namesake.score < founder.score


def test_words_of_other_prompts_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts share the numbering, which outlives passages, so another may have filled it with words that begin as
    those of the question do."""
    looked_up: list[int] = []

    def counting(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def counted(numbers: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
            looked_up.append(len(numbers))
            return function(numbers, size)

        return counted

    monkeypatch.setattr(relevance_pages, "mark", counting(mark))
    monkeypatch.setattr(relevance_pages, "places_of", counting(places_of))

    words = page_words([[text] for text in PASSAGES], "Which river stands in the birthplace of Ada Brix, founder?")
    numbering, ranked = words.pages[0][0].numbering, []
    for others in (1, 500):
        for word in words.question:
            for number in range(others):
                numbering[f"{word}{number}"]
        looked_up.clear()
        anew = PageWords(words.pages, words.question)
        said = [(anew.matches(page), anew.with_names(page), links_of(anew, page)) for page in range(len(PASSAGES))]
        in_sentences = sum(len(each.numbers) for each in anew._rare_stems.values())
        ranked.append((anew.scores(), said, sum(looked_up), in_sentences))
    assert len(numbering) > 500 * len(words.question) and ranked[0] == ranked[1]
    assert ranked[0][0] == words.scores()


def test_names_do_not_only_begin_sentences() -> None:
    words = page_words([["Ada Brix sold. Demand was strong. The Firm. It has 7."], ["a firm"]], "?")
    assert words.with_names(0) == [0, 3]  # for Brix and 7
    assert words.with_names(1) == []


def test_a_name_of_a_page_counts_where_it_begins_a_sentence_of_another_of_its_passages() -> None:
    passages = ["They met Brix. They talked.", "Brix left. They waited."]
    assert page_words([passages, ["a firm"]], "?").with_names(0) == [0, 2]
    assert page_words([passages[:1], passages[1:]], "?").with_names(1) == []
