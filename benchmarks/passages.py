"""Passages of synthetic text, cut out of generated worlds."""

from __future__ import annotations

from random import Random
from typing import Any

from vllm_blend.quality.worlds import question_episode


def make_passages(tokenizer: Any, rng: Random, count: int, length: int) -> tuple[list[list[int]], list[int]]:
    """Return `count` passages of `length` tokens each, cut out of the pages of worlds, and a question about one."""
    ids: list[int] = []
    questions: list[str] = []
    while len(ids) < count * length:
        episode = question_episode(rng, 8)
        questions += [each.text for each in episode.questions if each.kind == "1hop"]
        for passage in episode.passages:
            ids += tokenizer.encode(passage.text + "\n\n", add_special_tokens=False)
    passages = [ids[number * length : (number + 1) * length] for number in range(count)]
    return passages, tokenizer.encode(questions[0], add_special_tokens=False)
