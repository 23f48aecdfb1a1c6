"""Rows from worlds: the demo model's prompts, from seeds that nothing else uses."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.engine.engines import DEMO
from vllm_blend.finetune.worlds import (
    ROWS_PER_SEED,
    TRAINING_SEEDS,
    WorldRows,
    draw_episode,
    run_seeds,
    world_shards,
)
from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.make_datasets import MUSIQUE_SEED, SAMSUM_SEED, WIKIMQA_SEED


def source(length: int = 1024) -> WorldRows:
    return WorldRows(AutoTokenizer.from_pretrained(DEMO).backend_tokenizer.to_str(), 0, 2, length)


def test_a_row_is_the_prompt_of_its_world() -> None:
    rows, tokenizer = source().shard(TRAINING_SEEDS.start, 3), AutoTokenizer.from_pretrained(DEMO)
    rng = Random(TRAINING_SEEDS.start)
    for ids, weights, chunks in zip(rows.ids, rows.weights, rows.chunks, strict=True):
        episode, filled = draw_episode(rng), weights > 0
        text = str(tokenizer.decode(ids[filled]))
        assert text.startswith("<s>" + episode.instruction) and (ids[~filled] == 2).all()
        assert chunks.max() == len(episode.passages)
        for number, passage in enumerate(episode.passages, 1):
            assert passage.text in tokenizer.decode(ids[chunks == number])
        style = PROMPT_STYLES["samsum" if episode.questions[0].kind == "sum" else "musique"]
        for question in episode.questions[:2]:
            assert f"{style.suffix(question.text)} {question.answer}\n" in text


def test_seeds_are_those_of_training_and_of_one_run_only() -> None:
    first, second = run_seeds(0, 10 * ROWS_PER_SEED), run_seeds(1, 10 * ROWS_PER_SEED + 1)
    assert (len(first), len(second)) == (10, 11) and not set(first) & set(second)
    assert set(first) | set(second) <= set(TRAINING_SEEDS)
    assert TRAINING_SEEDS.stop <= min(MUSIQUE_SEED, WIKIMQA_SEED, SAMSUM_SEED)
    with pytest.raises(ValueError, match="--seed is 90"):
        run_seeds(90, 1)
    with pytest.raises(ValueError, match="--prompts is 0"):
        run_seeds(0, 0)


def test_too_short_rows_are_refused_before_work() -> None:
    source(1024).check()
    with pytest.raises(ValueError, match="raise --max-length"):
        source(64).check()


@pytest.mark.slow
def test_a_worker_makes_what_this_process_makes() -> None:
    seeds = run_seeds(3, 1)
    with world_shards(source(), seeds, 0) as here, world_shards(source(), seeds, 1) as there:
        ours, [theirs] = next(iter(here)), list(there)
    assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.chunks, theirs.chunks)
