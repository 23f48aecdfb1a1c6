"""What settings say of a prompt is of the sample's passages."""

from __future__ import annotations

from typing import Any

from tests.quality.small import small_samples
from vllm_blend.pipeline import build_qa_prompt, normalize_sample
from vllm_blend.quality.arrangements import nearest_passage, relevant_first, with_pages


def sample_of(*pieces: tuple[str | None, str], question: str = "Who made the lens?") -> Any:
    ctxs = [{"title": "", "text": text} | ({} if page is None else {"page_id": page}) for page, text in pieces]
    return normalize_sample(small_samples(1)[0] | {"ctxs": ctxs, "question": question, "gold": [0]})


def test_pages_go_on_from_their_last_passage() -> None:
    sample = sample_of(("a", "1"), ("b", "2"), ("a", "3"), (None, "4"), ("a", "5"), (None, "6"))
    prompt = with_pages(sample, build_qa_prompt(sample, "musique"))
    assert prompt["continues"] == [None, None, 0, None, 2, None]
    assert prompt["chunks"] == build_qa_prompt(sample, "musique")["chunks"]


def test_relevant_pages_come_first_whole() -> None:
    sample = sample_of(("a", "A boat sank."), ("b", "Ilse made it."), ("a", "Rain fell."), ("b", "The lens was hers."))
    plain = build_qa_prompt(sample, "musique")
    prompt = relevant_first(sample, plain)
    assert prompt["chunks"] == [plain["chunks"][index] for index in (1, 3, 0, 2)]
    assert prompt["continues"] == [None, 0, None, 2] and prompt["suffix"] == plain["suffix"]


def test_the_nearest_passage_is_another_one() -> None:
    sample = sample_of((None, "The lens of Orm."), (None, "A boat sank in May."), (None, "Orm sold the lens."))
    plain = build_qa_prompt(sample, "musique")
    prompt = nearest_passage(sample, plain)
    assert [prompt["encode_after"][index] for index in (0, 2)] == [plain["chunks"][2], plain["chunks"][0]]
    assert prompt["encode_after"][1] in (plain["chunks"][0], plain["chunks"][2])
    alone = sample_of((None, "The lens."))
    assert nearest_passage(alone, build_qa_prompt(alone, "musique")) == build_qa_prompt(alone, "musique")
