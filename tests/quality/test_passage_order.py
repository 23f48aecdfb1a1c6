"""Passages that continue one another, and those that stand first."""

from __future__ import annotations

import pytest

from vllm_blend.pipeline.datasets import Sample, SamplePassage
from vllm_blend.quality.arrangements import page_predecessors, relevant_pages_first

pytestmark = pytest.mark.cpu_only


def sample(question: str, *passages: tuple[str, str | None]) -> Sample:
    return Sample("s", question, tuple(SamplePassage("", text, page) for text, page in passages), ("x",), None, None)


PAGES = sample(
    "What stands on the river Waindkais?",
    ("Klenem was a historian.", "Klenem"),
    ("Later he founded a union.", "Klenem"),
    ("Nobody knows where this is from.", None),
    ("Yiamdond is a city.", "Yiamdond"),
    ("It stands on the river Waindkais.", "Yiamdond"),
    ("He wrote a book.", "Klenem"),
    ("Nor this.", None),
)


def test_predecessors_are_places_in_the_prompt() -> None:
    assert page_predecessors(PAGES) == [None, 0, None, None, 3, 1, None]
    assert page_predecessors(PAGES, [4, 3, 5, 0, 1]) == [None, None, None, None, 3]
    assert page_predecessors(PAGES, [0, 4, 5]) == [None, None, 0]


def test_the_page_of_the_best_passage_stands_first_and_whole() -> None:
    assert relevant_pages_first(PAGES) == [3, 4, 0, 1, 5, 2, 6]


def test_passages_without_a_page_are_ranked_one_by_one() -> None:
    loose = sample("Who likes salt?", ("Bread.", None), ("Salt is liked.", None), ("Stars.", None))
    assert relevant_pages_first(loose) == [1, 0, 2]


def test_a_question_of_no_known_word_keeps_the_order() -> None:
    assert relevant_pages_first(sample("Hm?", ("Bread.", "a"), ("Stars.", "b"))) == [0, 1]
