"""The shipped model that was trained for reuse answers from reused chunks alone as well as by full prefill."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.engine.engines import DEMO, ROOT, engine, greedy, run
from vllm_blend.pipeline.prompts import PROMPT_STYLES, render_passage
from vllm_blend.quality.splits import DEVELOPMENT, split_of
from vllm_blend.quality.worlds import question_episode

REUSE_FRIENDLY = str(ROOT / "inputs" / "demo-model-reuse")
SEEDS = range(DEVELOPMENT.seed(50_000), DEVELOPMENT.seed(50_004))
STYLE = PROMPT_STYLES["musique"]

pytestmark = pytest.mark.cpu_only


def questions() -> list[tuple[dict[str, Any], str]]:
    """A question of each kind about every world, as a prompt and its answer."""
    asked = []
    for seed in SEEDS:
        episode = question_episode(Random(seed), families=2)
        chunks = [render_passage(passage.title, passage.text) for passage in episode.passages]
        shuffled = Random(seed).sample(episode.questions, len(episode.questions))
        for question in {question.kind: question for question in shuffled}.values():
            prompt = {"prefix": episode.instruction, "chunks": chunks, "suffix": STYLE.suffix(question.text)}
            asked.append((prompt, question.answer))
    return asked


def right_answers(model: str, *selectors: str) -> list[int]:
    """Return how many answers are right by each selector."""
    asked = questions()
    prompts = [{**prompt, "blend_selector": selector} for selector in selectors for prompt, _ in asked]
    with engine(model, enable_blending=True) as llm:
        outputs = run(llm, prompts, greedy(STYLE.max_tokens, stop="\n"))
    right = [output.outputs[0].text.strip() for output in outputs]
    parts = (right[first : first + len(asked)] for first in range(0, len(right), len(asked)))
    return [sum(text == answer for text, (_, answer) in zip(part, asked, strict=True)) for part in parts]


def test_worlds_are_none_that_it_was_trained_on() -> None:
    assert all(split_of(seed) is DEVELOPMENT for seed in SEEDS) and len(questions()) == 3 * len(SEEDS)


def test_it_answers_as_well_from_reused_chunks_as_in_full() -> None:
    full, reused = right_answers(REUSE_FRIENDLY, "full", "none")
    assert full >= 9 and reused >= full - 2


def test_the_model_it_was_trained_from_does_not() -> None:
    full, reused = right_answers(DEMO, "full", "none")
    assert full >= 9 and reused <= full / 2
