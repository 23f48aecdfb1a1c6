"""Rows from worlds: the demo model's prompts, from seeds that nothing else uses."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.engine.engines import DEMO
from vllm_blend.finetune import sources
from vllm_blend.finetune.sources import WorldOptions, world_source
from vllm_blend.finetune.worlds import (
    DEVELOPMENT_WORLD,
    ROWS_PER_SEED,
    TRAINING_SEEDS,
    WorldRows,
    development_rows,
    draw_episode,
    row_shape,
    run_seeds,
    share_out,
    world_shards,
)
from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.make_datasets import MOST_FAMILIES, WORLDS_PER_CELL
from vllm_blend.quality.splits import DEVELOPMENT, TRAINING


def source(length: int = 1024) -> WorldRows:
    return WorldRows(AutoTokenizer.from_pretrained(DEMO).backend_tokenizer.to_str(), 0, 2, length)


def test_a_row_is_the_prompt_of_its_world() -> None:
    rows, tokenizer = source().shard(TRAINING_SEEDS.start, 3), AutoTokenizer.from_pretrained(DEMO)
    rng, shape = Random(TRAINING_SEEDS.start), row_shape(1024)
    for ids, weights, chunks in zip(rows.ids, rows.weights, rows.chunks, strict=True):
        episode, filled = draw_episode(rng, shape), weights > 0
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
    assert set(TRAINING_SEEDS) <= set(TRAINING.seeds)
    with pytest.raises(ValueError, match="--seed is 90"):
        run_seeds(90, 1)
    with pytest.raises(ValueError, match="--prompts is 0"):
        run_seeds(0, 0)


def test_too_short_rows_are_refused_before_work() -> None:
    source(1024).check()
    with pytest.raises(ValueError, match="raise --max-length"):
        source(64).check()


def test_longer_rows_have_larger_worlds_and_more_questions() -> None:
    numbers = {length: source(length).shard(TRAINING_SEEDS.start, 12).chunks.max(1) for length in (1024, 2048, 4096)}
    most = {length: 6 * families for length, families in ((1024, 3), (2048, 6), (4096, 8))}  # 4 to 6 passages each
    assert all(most[length] // 2 < passages.max() <= most[length] for length, passages in numbers.items())
    assert row_shape(2048).families == (1, 6) and row_shape(4096).families == (3, 8)


def test_development_rows_are_of_development_worlds_that_nothing_is_measured_on() -> None:
    seed = DEVELOPMENT.seed(DEVELOPMENT_WORLD)
    assert np.array_equal(development_rows(source(), 3).ids, source().shard(seed, 3).ids)
    cells = 1 + MOST_FAMILIES  # the first worlds are in none
    assert cells * WORLDS_PER_CELL <= DEVELOPMENT_WORLD


def test_shorter_rows_are_more_and_a_later_process_goes_on_with_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(sources, "world_shards", lambda makers, jobs, workers: given.append(list(jobs)))
    options = WorldOptions([1024, 2048], [1.0, 1.0], 9 * ROWS_PER_SEED, seed=0, workers=0, development=0)
    tokenizer = source().tokenizer_json
    for received in (0, 4 * ROWS_PER_SEED):
        made = world_source(replace(options, received=received), tokenizer, 0, 2)
        assert made.capacities == [6 * ROWS_PER_SEED, 3 * ROWS_PER_SEED]
    assert given[1] == given[0][4:] + given[0][:4] and len(set(given[0])) == 9


def test_seeds_are_shared_out_evenly_from_the_beginning() -> None:
    jobs = share_out(range(100, 140), [3.0, 1.0])
    assert [seed for _, seed in jobs] == list(range(100, 140))
    for first in range(1, 41):
        assert abs(sum(number == 0 for number, _ in jobs[:first]) - 0.75 * first) <= 1


@pytest.mark.slow
def test_a_worker_makes_what_this_process_makes() -> None:
    seeds = run_seeds(3, 1)
    jobs = [(0, seed) for seed in seeds]
    with world_shards([source()], jobs, 0) as here, world_shards([source()], jobs, 1) as there:
        ours, [theirs] = next(iter(here)), list(there)
    assert np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.chunks, theirs.chunks)
