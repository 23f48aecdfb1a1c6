"""Which passages matter for a question: BM25 against a library, pages, links, given scores, order of sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.engine.engines import DEMO
from vllm_blend.blend.relevance.bm25 import bm25_scores
from vllm_blend.blend.relevance.pages import Link, PageWords, group_pages
from vllm_blend.blend.relevance.passages import PromptPassages
from vllm_blend.blend.relevance.words import WordIndex, split_words

pytestmark = pytest.mark.cpu_only
TOKENIZER = AutoTokenizer.from_pretrained(DEMO)

ADA = "Ada Brix was a chemist born in Wesgro in 1850. The family moved often."
ADA_LATER = "Later she founded Kejoux Works. She married Ole Finn."
WESGRO = "Wesgro is a city in Flaipia. It stands on the river Pamzou."
OTHER_CITY = "Shassrou is a city in Klivia. It stands on the river Chossbeas."
KEJOUX = "Kejoux Works makes clocks. Its director is Griol Maix."
PASSAGES = [OTHER_CITY, KEJOUX, ADA, ADA_LATER, WESGRO]
CONTINUES = (None, None, None, 2, None)


def prompt(
    texts: Sequence[str], question: str, continues: Sequence[int | None] = (), relevance: Sequence[Sequence[float]] = ()
) -> tuple[PromptPassages, list[int]]:
    """The passages of a prompt, behind a prefix of three tokens, and the token ids of all."""
    index, ids, bounds = WordIndex(TOKENIZER), [0, 0, 0], []
    for text in texts:
        start = len(ids)
        ids += TOKENIZER.encode(text, add_special_tokens=False)
        bounds.append((start, len(ids)))

    def read_words() -> tuple[list[Any], list[str]]:
        return [index.read(ids[start:stop]) for start, stop in bounds], list(dict.fromkeys(split_words(question)))

    return PromptPassages(tuple(bounds), tuple(continues), tuple(map(tuple, relevance)), read_words), ids


def chosen_text(texts: Sequence[str], question: str, count: int, **options: Any) -> list[str]:
    """The sentences that come first."""
    passages, ids = prompt(texts, question, **options)
    groups = passages.ranked_sentences()
    assert groups is not None
    spans = [span for group in groups for span in group]
    return [str(TOKENIZER.decode(ids[slice(*span)])).strip() for span in spans[:count]]


@given(
    st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=12), min_size=1, max_size=8),
    st.lists(st.sampled_from("abcdefgx"), min_size=1, max_size=6, unique=True),
)
def test_bm25_is_the_librarys(texts: list[list[str]], question: list[str]) -> None:
    library = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    library.index(texts, show_progress=False)
    known = [word for word in question if word in library.vocab_dict]
    expected = library.get_scores(known) if known else np.zeros(len(texts))
    scores = bm25_scores([[text.count(word) for text in texts] for word in question], list(map(len, texts)))
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


def test_pages() -> None:
    assert group_pages(3, ()) == [[0], [1], [2]]
    assert group_pages(6, (None, 0, None, 1, 2, None)) == [[0, 1, 3], [2, 4], [5]]


def test_the_page_that_is_about_the_question_comes_first() -> None:
    """More pages mention the name, and one of them twice."""
    mention = "The mayor had few friends. Ada Brix was one. Ada Brix came often."
    passages, _ = prompt(
        [mention, *PASSAGES], "What was the profession of Ada Brix?", (None, None, None, None, 3, None)
    )
    ranked = passages.ranked_pages()
    assert ranked is not None and passages.pages[ranked[0]] == [3, 4]


def test_links_lead_from_the_first_page_to_the_second() -> None:
    passages, _ = prompt(PASSAGES, "Which river flows through the birthplace of Ada Brix?", CONTINUES)
    ranked = passages.ranked_pages()
    assert ranked is not None
    assert [passages.pages[page] for page in ranked[:2]] == [[2, 3], [4]]  # and not the other city with a river
    passages, _ = prompt(PASSAGES, "What does the company founded by Ada Brix make?", CONTINUES)
    ranked = passages.ranked_pages()
    assert ranked is not None
    assert [passages.pages[page] for page in ranked[:2]] == [[2, 3], [1]]


def test_a_page_that_mentions_the_first_is_linked_to_it() -> None:
    passages, _ = prompt(PASSAGES, "Who founded Kejoux Works?", CONTINUES)
    ranked = passages.ranked_pages()
    assert ranked is not None
    assert [passages.pages[page] for page in ranked[:2]] == [[1], [2, 3]]


def test_links_say_how_they_lead() -> None:
    passages, _ = prompt(PASSAGES, "Where does the river at the birthplace of Ada Brix flow?")
    words, question = passages.read_words()
    other, _, ada, _, wesgro = PageWords([[each] for each in words], question).links(2)
    assert ada == Link()
    assert wesgro.words >= {"wesgro"} and wesgro.is_asked_for  # it has the river, which Ada's page lacks
    assert wesgro.score > other.score


def test_sentences_with_the_questions_words_come_before_others_of_their_page() -> None:
    assert chosen_text(PASSAGES, "Whom did Ada Brix marry?", 4, continues=CONTINUES) == [
        "Ada Brix was a chemist born in Wesgro in 1850.",
        "She married Ole Finn.",  # "marry" and "married" begin alike
        "The family moved often.",
        "Later she founded Kejoux Works.",
    ]


def test_a_question_about_two_pages_gets_the_sentences_of_both() -> None:
    """They come before what else is on the first page: that the family moved often, and whom she married."""
    assert chosen_text(PASSAGES, "Who is director of the company founded by Ada Brix?", 4, continues=CONTINUES) == [
        "Ada Brix was a chemist born in Wesgro in 1850.",
        "Later she founded Kejoux Works.",
        "Kejoux Works makes clocks.",
        "Its director is Griol Maix.",
    ]


def test_only_what_is_needed() -> None:
    passages, _ = prompt(PASSAGES, "Whom did Ada Brix marry?", CONTINUES)
    needed = passages.ranked_sentences(only_needed=True)
    assert needed is not None and list(map(len, needed)) == [4]  # all of Ada's page
    passages, _ = prompt(PASSAGES, "Who is director of the company founded by Ada Brix?", CONTINUES)
    needed, ranked = passages.ranked_sentences(only_needed=True), passages.ranked_sentences()
    assert needed is not None and ranked is not None and list(needed) == list(ranked)


@pytest.mark.parametrize("question", ["Ada Brix", "Which river flows through the birthplace of Ada Brix?"])
def test_every_token_is_ranked_once(question: str) -> None:
    passages, ids = prompt(PASSAGES, question, CONTINUES)
    groups = passages.ranked_sentences()
    assert groups is not None
    assert sorted(p for group in groups for span in group for p in range(*span)) == list(range(3, len(ids)))


def test_given_relevance_goes_before_words() -> None:
    scores = [0.1, -3.0, 0.2, 0.0, 7.5]
    assert chosen_text(PASSAGES, "Who founded Kejoux Works?", 1, relevance=[scores])[0].startswith("Wesgro is")
    # A page is as relevant as its best passage.
    first = chosen_text(PASSAGES, "?", 1, continues=CONTINUES, relevance=[[0.0, 0.0, 0.0, 1.0, 0.5]])
    assert first[0].startswith("Ada Brix")


def test_several_scores_are_fused_by_rank() -> None:
    huge, small = [1e6, 10.0, 9.0, 0.0, 0.0], [0.1, 0.4, 0.5, 0.3, 0.2]  # ranks 1 2 3 4 4 and 5 2 1 3 4
    passages, _ = prompt(PASSAGES, "?", relevance=[huge, small])
    ranked = passages.ranked_pages()
    assert ranked is not None and ranked[0] == 2  # 1/63 + 1/61 is more than 2/62 and 1/61 + 1/65


@pytest.mark.parametrize("question", ["xyzzy?", "", "???"])
def test_without_a_signal_there_is_no_ranking(question: str) -> None:
    passages, _ = prompt(PASSAGES, question, CONTINUES)
    assert passages.ranked_pages() is None and passages.ranked_sentences() is None
    twice = ["Ada Brix was a chemist.", "Ada Brix was a sailor.", KEJOUX]
    assert prompt(twice, "What did Ada Brix do?")[0].ranked_pages() is None  # which of the two?
    passages, _ = prompt(PASSAGES, question, relevance=[[2.0] * 5])
    assert passages.ranked_sentences() is None
    passages, _ = prompt([ADA], "Ada Brix")  # a single page
    assert passages.ranked_sentences() is None


def test_scripts_without_spaces() -> None:
    texts = ["大阪は日本の都市です。川が流れています。", "京都は古い都です。寺が多いです。"]
    assert chosen_text(texts, "京都に寺はありますか?", 2) == ["京都は古い都です。", "寺が多いです。"]


def test_code_and_digits() -> None:
    texts = ["def load_rows(path):\n    return 17\n", "def save_rows(path):\n    return 42\n"]
    assert chosen_text(texts, "What does save_rows return?", 1) == ["def save_rows(path):"]
    assert chosen_text(["Order 4711 was paid.", "Order 4712 was sent."], "Was 4712 sent?", 1) == [
        "Order 4712 was sent."
    ]
