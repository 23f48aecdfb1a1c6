"""Make training rows from synthetic worlds, in worker processes while training goes on.

The distribution is the demo model's (`quality/worlds.py`): 12% dialogues to summarise, else a world with 6 to 20 of its
questions. Seeds stay in `TRAINING_SEEDS`: the demo model itself was trained on seeds below 2,000, and everything is
evaluated on seeds above 1,000,000.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from tokenizers import Tokenizer

from vllm_blend.finetune.rows import Encode, Row, Rows, make_row, pad_rows
from vllm_blend.pipeline.prompts import PROMPT_STYLES, render_passage
from vllm_blend.quality.dialogues import summary_episode
from vllm_blend.quality.worlds import Episode, question_episode

TRAINING_SEEDS = range(100_000, 1_000_000)
SEEDS_PER_RUN = 10_000  # each --seed has its own
ROWS_PER_SEED = 256
SUMMARY_SHARE = 0.12
FEWEST_QUESTIONS, MOST_QUESTIONS = 6, 20
CHECKED_WORLDS = 20  # tried before training begins


@dataclass(frozen=True)
class WorldRows:
    """What a worker needs. `bos` is the id before a prompt, or None; `length` is that of a row, in tokens."""

    tokenizer_json: str
    bos: int | None
    padding: int
    length: int

    def shard(self, seed: int, rows: int) -> Rows:
        """Return `rows` rows of one random stream; prompts that are too long are drawn again."""
        rng, encode = Random(seed), self._encode()
        made: list[Row] = []
        while len(made) < rows:
            row = episode_row(draw_episode(rng), encode, self.bos, self.length)
            if row is not None:
                made.append(row)
        return pad_rows(made, self.length, self.padding)

    def check(self) -> None:
        """Raise ValueError if too few worlds fit the rows: drawing them again and again would not end."""
        rng, encode = Random(TRAINING_SEEDS.start), self._encode()
        drawn = (episode_row(draw_episode(rng), encode, self.bos, self.length) for _ in range(CHECKED_WORLDS))
        fitting = sum(row is not None for row in drawn)
        if fitting < CHECKED_WORLDS // 2:
            raise ValueError(
                f"only {fitting} of {CHECKED_WORLDS} worlds fit {self.length} tokens: raise --max-length (about 1,024 "
                "with the demo model's tokenizer), or use a model with more positions"
            )

    def _encode(self) -> Encode:
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def draw_episode(rng: Random) -> Episode:
    """Return a dialogue to summarise, or a world with some of its questions in random order."""
    if rng.random() < SUMMARY_SHARE:
        return summary_episode(rng)
    episode = question_episode(rng)
    questions = list(episode.questions)
    rng.shuffle(questions)
    number = rng.randint(FEWEST_QUESTIONS, MOST_QUESTIONS)
    return Episode(episode.instruction, episode.passages, tuple(questions[:number]))


def episode_row(episode: Episode, encode: Encode, bos: int | None, length: int) -> Row | None:
    """Return the episode as one prompt in which its questions follow one another, each with its answer."""
    passages = [render_passage(passage.title, passage.text) for passage in episode.passages]
    turns = []
    for question in episode.questions:
        style = PROMPT_STYLES["samsum" if question.kind == "sum" else "musique"]  # musique and wikimqa ask alike
        turns.append((style.suffix(question.text), f" {question.answer}\n"))
    return make_row(episode.instruction, passages, turns, encode, bos, length)


def run_seeds(run_seed: int, prompts: int) -> range:
    """Return one seed for each shard of `prompts` prompts, shared with no run of another --seed."""
    needed, first = -(-prompts // ROWS_PER_SEED), TRAINING_SEEDS.start + run_seed * SEEDS_PER_RUN
    runs = len(TRAINING_SEEDS) // SEEDS_PER_RUN
    if not 0 <= run_seed < runs:
        raise ValueError(f"--seed is {run_seed}: worlds are made for seeds 0 to {runs - 1}")
    if not 1 <= needed <= SEEDS_PER_RUN:
        raise ValueError(f"--prompts is {prompts}: use 1 to {SEEDS_PER_RUN * ROWS_PER_SEED}")
    return range(first, first + needed)


_source: WorldRows  # in a worker process


def _start_worker(source: WorldRows) -> None:
    global _source
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is a process
    _source = source


def _make_rows(seed: int) -> Rows:
    return _source.shard(seed, ROWS_PER_SEED)


@contextmanager
def world_shards(source: WorldRows, seeds: range, workers: int) -> Iterator[Iterator[Rows]]:
    """Yield shards as they are made, in no fixed order; without workers, in this process when they are asked for.

    The iterator of a pool has `next(timeout)`, as `multiprocessing.Pool.imap_unordered` says.
    """
    if workers == 0:
        yield (source.shard(seed, ROWS_PER_SEED) for seed in seeds)
        return
    # Spawned, as this process has threads and perhaps a GPU.
    pool: Any = multiprocessing.get_context("spawn").Pool(workers, _start_worker, (source,))
    with pool:
        yield pool.imap_unordered(_make_rows, seeds)
