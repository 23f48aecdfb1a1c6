"""Passages are ranked by pages, links and given scores, and their sentences follow in order of relevance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.blend.relevance.texts import (
    ADA,
    ADA_LATER,
    CONTINUES,
    KEJOUX,
    OTHER_CITY,
    PASSAGES,
    WESGRO,
    chosen_text,
    groups_of,
    prompt_of,
)
from vllm_blend.blend.relevance.passages import _fuse, _is_clear

pytestmark = pytest.mark.cpu_only


def test_the_page_that_is_about_the_question_comes_first() -> None:
    """More pages mention the name, and one of them twice."""
    mention = "The mayor had few friends. Ada Brix was one. Ada Brix came often."
    passages, _ = prompt_of(
        [mention, *PASSAGES], "What was the profession of Ada Brix?", (None, None, None, None, 3, None)
    )
    ranked = passages.ranked_pages()
    assert ranked is not None and passages.pages[ranked[0]] == [3, 4]


def test_links_lead_from_the_first_page_to_the_second() -> None:
    passages, _ = prompt_of(PASSAGES, "Which river flows through the birthplace of Ada Brix?", CONTINUES)
    ranked = passages.ranked_pages()
    assert ranked is not None
    assert [passages.pages[page] for page in ranked[:2]] == [[2, 3], [4]]  # and not the other city with a river
    passages, _ = prompt_of(PASSAGES, "What does the company founded by Ada Brix make?", CONTINUES)
    ranked = passages.ranked_pages()
    assert ranked is not None
    assert [passages.pages[page] for page in ranked[:2]] == [[2, 3], [1]]


def test_a_page_that_mentions_the_first_is_linked_to_it() -> None:
    passages, _ = prompt_of(PASSAGES, "Who founded Kejoux Works?", CONTINUES)
    ranked = passages.ranked_pages()
    assert ranked is not None
    assert [passages.pages[page] for page in ranked[:2]] == [[1], [2, 3]]


def test_sentences_with_the_questions_words_come_before_others_of_their_page() -> None:
    assert chosen_text(PASSAGES, "Whom did Ada Brix marry?", 4, continues=CONTINUES) == [
        "Ada Brix was a chemist born in Wesgro in 1850.",
        "She married Ole Finn.",  # "marry" and "married" begin alike
        "Later she founded Kejoux Works.",
        "Kejoux Works makes clocks.",
    ]


def test_sentences_without_names_come_behind_those_of_linked_pages_that_have_some() -> None:
    """Nothing tells that this question needs the second page: it has no word of the question. What links the pages,
    and how the second begins, comes first all the same."""
    pages = [KEJOUX.replace("clocks.", "clocks. Ledgers burnt. It has 40 workers."), ADA, ADA_LATER, OTHER_CITY]
    question, continues = "Ada Brix?", (None, None, 1, None)
    assert chosen_text(pages, question, 8, continues=continues) == [
        "Ada Brix was a chemist born in Wesgro in 1850.",
        "Later she founded Kejoux Works.",
        "Kejoux Works makes clocks.",
        "She married Ole Finn.",
        "It has 40 workers.",
        "Its director is Griol Maix.",
        "The family moved often.",
        "Ledgers burnt.",
    ]


def test_a_question_about_two_pages_gets_the_sentences_of_both() -> None:
    """They come before what else is on the first page: whom she married, then another page that it leads to, and that
    the family moved often. A page that nothing leads to comes last."""
    assert chosen_text(PASSAGES, "Who is director of the company founded by Ada Brix?", 9, continues=CONTINUES) == [
        "Ada Brix was a chemist born in Wesgro in 1850.",
        "Later she founded Kejoux Works.",
        "Kejoux Works makes clocks.",
        "Its director is Griol Maix.",
        "She married Ole Finn.",
        "Wesgro is a city in Flaipia.",
        "It stands on the river Pamzou.",
        "The family moved often.",
        "Shassrou is a city in Klivia.",
    ]


def test_a_question_about_one_page_gets_the_beginnings_of_two_that_it_leads_to() -> None:
    """Their other sentences come behind all with names of the first page; those of a third, behind all of these."""
    third = "Ole Finn was a baker. His bakery stood in Shassrou."
    assert chosen_text([*PASSAGES, third], "Whom did Ada Brix marry?", 11, continues=(*CONTINUES, None)) == [
        "Ada Brix was a chemist born in Wesgro in 1850.",
        "She married Ole Finn.",
        "Ole Finn was a baker.",
        "Later she founded Kejoux Works.",
        "Kejoux Works makes clocks.",
        "His bakery stood in Shassrou.",
        "Its director is Griol Maix.",
        "The family moved often.",
        "Wesgro is a city in Flaipia.",
        "It stands on the river Pamzou.",
        "Shassrou is a city in Klivia.",
    ]


def test_of_the_first_page_two_matching_sentences_come_before_the_second_page() -> None:
    """The sentence that links the pages comes before it as well, even if it has no word of the question."""
    question, second = "Who is director of the company founded by Ada Brix?", KEJOUX.replace(". ", ".|").split("|")
    head, found = "Ada Brix was head of Kejoux Works.", ["Her company was founded late.", "No company founded better."]
    rest = ["Some say founded thrice.", "They moved often."]
    page = " ".join([head, *rest[::-1], *found])
    assert chosen_text([KEJOUX, page, *PASSAGES[:1]], question, 7) == [head, *found, *second, *rest]
    page = "Ada Brix was a chemist. They moved often. Kejoux Works was hers."
    assert chosen_text([KEJOUX, page, *PASSAGES[:1]], question, 4) == [
        "Ada Brix was a chemist.",
        "Kejoux Works was hers.",
        *second,
    ]


@pytest.mark.parametrize(
    ("question", "asks_for_one"),
    [
        ("Whom did Ada Brix marry?", True),
        ("Who is director of the company founded by Ada Brix?", False),  # "director": the second page alone has it
        ("Which river flows through the birthplace of Ada Brix?", False),
        ("xyzzy?", False),  # about none
    ],
)
def test_a_question_about_one_page_has_no_word_that_only_the_next_page_has(question: str, asks_for_one: bool) -> None:
    passages, _ = prompt_of(PASSAGES, question, CONTINUES)
    assert passages.asks_for_one_page() is asks_for_one
    assert not replace(passages, is_ranked=True).asks_for_one_page()
    scored = replace(passages, relevance=((0.0, 0.0, 1.0, 0.0, 0.0),))  # which say nothing about that
    assert not scored.asks_for_one_page()


@pytest.mark.parametrize("question", ["Ada Brix", "Which river flows through the birthplace of Ada Brix?"])
def test_every_token_is_ranked_once(question: str) -> None:
    passages, ids = prompt_of(PASSAGES, question, CONTINUES)
    groups = groups_of(passages)
    assert sorted(p for group in groups for span in group for p in range(*span)) == list(range(3, len(ids)))


def test_given_relevance_goes_before_words() -> None:
    scores = [0.1, -3.0, 0.2, 0.0, 7.5]
    assert chosen_text(PASSAGES, "Who founded Kejoux Works?", 1, relevance=[scores])[0].startswith("Wesgro is")
    # A page is as relevant as its best passage.
    first = chosen_text(PASSAGES, "?", 1, continues=CONTINUES, relevance=[[0.0, 0.0, 0.0, 1.0, 0.5]])
    assert first[0].startswith("Ada Brix")
    twice, _ = prompt_of(PASSAGES, "?", CONTINUES, relevance=[[0.0, 5.0, 3.0, 3.0, 0.0]])
    ranked = twice.ranked_pages()
    assert ranked is not None and twice.pages[ranked[0]] == [1]


def test_links_of_the_given_first_page_lead_to_the_second() -> None:
    question = "Which river flows through the birthplace of Ada Brix?"
    passages, _ = prompt_of(PASSAGES, question, CONTINUES, relevance=[[0.0, 0.0, 1.0, 1.0, 0.0]])
    ranked = passages.ranked_pages()
    assert ranked is not None and [passages.pages[page] for page in ranked[:2]] == [[2, 3], [4]]


def test_pages_without_a_link_come_by_their_own_words() -> None:
    passages, _ = prompt_of(["Long tales.", "Old men sailed.", "Ada Brix."], "Ada Brix sailed")
    assert passages.ranked_pages() == [2, 1, 0]


def test_equal_scores_have_the_best_of_their_ranks() -> None:
    assert _fuse([[5.0, 5.0, 0.0]]) == [1 / 61, 1 / 61, 1 / 63]


def test_the_best_page_is_clear_if_the_next_has_a_tenth_less_or_no_fourth_is_near() -> None:
    assert _is_clear([0.0, 10.0, 9.0, 9.0, 9.0]) and _is_clear([9.1, 9.1, 5.0, 10.0, 0.0])
    assert not _is_clear([9.1, 9.1, 5.1, 10.0, 0.0]) and not _is_clear([9.1, 9.1, 9.1, 10.0])
    assert _is_clear([9.1, 9.1, 10.0]) and _is_clear([9.1, 10.0])


def test_pages_that_are_alike_come_before_those_that_they_lead_to() -> None:
    twice = ["Ada Brix was a chemist. She came to Wesgro.", "Ada Brix was a sailor.", WESGRO, KEJOUX, OTHER_CITY]
    passages, _ = prompt_of(twice, "What did Ada Brix do?")
    ranked = passages.ranked_pages()
    assert ranked is not None and sorted(ranked[:2]) == [0, 1] and ranked[2] == 2
    assert not passages.asks_for_one_page()
    thrice = ["Ada Brix was a chemist.", "Ada Brix was a sailor.", "Ada Brix was a painter.", KEJOUX]
    ranked = prompt_of([KEJOUX, *thrice], "What did Ada Brix do?")[0].ranked_pages()
    assert ranked is not None and sorted(ranked[:3]) == [1, 2, 3]


def test_sentences_of_pages_that_are_alike_come_by_turns() -> None:
    """How each begins, then what has names or numbers, and then the rest of the first."""
    pages = [
        "Ada Brix was a chemist. She had 3 shops. They moved.",
        "Ada Brix was a sailor. She had 4 boats. They sailed.",
        KEJOUX,
    ]
    assert chosen_text(pages, "What did Ada Brix do?", 6) == [
        "Ada Brix was a chemist.",
        "Ada Brix was a sailor.",
        "She had 3 shops.",
        "She had 4 boats.",
        "They moved.",
        "They sailed.",
    ]


def test_several_scores_are_fused_by_rank() -> None:
    huge, small = [1e6, 10.0, 9.0, 0.0, 0.0], [0.1, 0.4, 0.5, 0.3, 0.2]  # ranks 1 2 3 4 4 and 5 2 1 3 4
    passages, _ = prompt_of(PASSAGES, "?", relevance=[huge, small])
    ranked = passages.ranked_pages()
    assert ranked is not None and ranked[0] == 2  # 1/63 + 1/61 is more than 2/62 and 1/61 + 1/65
    passages, _ = prompt_of(PASSAGES, "?", relevance=[[9.0, 8.0, 7.0, 6.0, 5.0], [2.0, 4.0, 3.0, 5.0, 1.0]])
    ranked = passages.ranked_pages()
    assert ranked is not None and ranked[0] == 1  # twice the second: 2/62 is more than 1/61 + 1/64


@pytest.mark.parametrize("question", ["xyzzy?", "", "???"])
def test_without_a_signal_there_is_no_ranking(question: str) -> None:
    passages, _ = prompt_of(PASSAGES, question, CONTINUES)
    assert passages.ranked_pages() is None and passages.ranked_sentences() is None
    alike = [f"Ada Brix was a {word}." for word in ("chemist", "sailor", "painter", "singer")]
    assert prompt_of([*alike, KEJOUX], "What did Ada Brix do?")[0].ranked_pages() is None  # which of the four?
    passages, _ = prompt_of(PASSAGES, question, relevance=[[2.0] * 5])
    assert passages.ranked_sentences() is None
    passages, _ = prompt_of([ADA], "Ada Brix")  # a single page
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
