"""How often the words of generated questions find a page that they need, and say nothing where they cannot know."""

from __future__ import annotations

from typing import Any

import pytest

from tests.blend.relevance.texts import prompt_of
from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.make_datasets import make_samples
from vllm_blend.quality.splits import DEVELOPMENT

pytestmark = pytest.mark.cpu_only


def first_page(sample: dict[str, Any], question: str) -> str | None:
    """Return the name of the page that is ranked first; None if there is no ranking."""
    texts, suffix = [passage["text"] for passage in sample["ctxs"]], PROMPT_STYLES["musique"].suffix(question)
    pages = [passage["page_id"] for passage in sample["ctxs"]]
    continues = [max((i for i in range(index) if pages[i] == page), default=None) for index, page in enumerate(pages)]
    passages, _ = prompt_of(texts, suffix, continues)
    ranked = passages.ranked_pages()
    return None if ranked is None else sample["ctxs"][passages.pages[ranked[0]][0]]["page_id"]


def test_the_page_of_a_plain_question_is_found_by_its_name_alone() -> None:
    samples, hidden = make_samples(DEVELOPMENT, 8, 36), 0
    clear = 0
    for sample in samples:
        [subject] = {passage["page_id"] for passage in sample["ctxs"] if passage["page_id"] in sample["question"]}
        found = first_page(sample, sample["question"])
        assert found in (None, subject)
        clear += found is not None
        hidden += first_page(sample, sample["question"].replace(subject, "it")) is not None
    assert clear >= 0.9 * len(samples) and hidden <= 0.3 * len(samples)
