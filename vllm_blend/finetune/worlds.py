"""Make training rows from synthetic worlds, in worker processes while training goes on.

The distribution is the demo model's (`quality/worlds.py`): some dialogues to summarise, else a world with some of its
questions. How large the worlds are and how many questions are asked depends on the length of the rows (`row_shape`).
Seeds are those of the training split, and in `development_rows` those of the development split (`quality/splits.py`).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from tokenizers import Tokenizer

from vllm_blend.finetune.rows import Encode, Row, Rows, make_row, pad_rows
from vllm_blend.pipeline.prompts import PROMPT_STYLES, render_passage
from vllm_blend.quality.dialogues import summary_episode
from vllm_blend.quality.splits import DEVELOPMENT, TRAINING
from vllm_blend.quality.worlds import Episode, question_episode

TRAINING_SEEDS = range(TRAINING.first, TRAINING.seeds.stop)
DEVELOPMENT_WORLD = 900_000  # the first world of the development split that stops training: rules are chosen on others
SEEDS_PER_RUN = 10_000  # each --seed has its own
ROWS_PER_SEED = 256
CHECKED_WORLDS = 20  # tried before training begins
DEMO_LENGTH = 1024  # of the demo model's rows
MOST_FAMILIES = 8  # of a world; 210 to 250 tokens each, with the demo model's tokenizer
TOKENS_PER_FAMILY = 320  # of a row, with questions


@dataclass(frozen=True)
class RowShape:
    """What is in rows of a length: the fewest and most families of a world (None: as in the demo model's training), the
    fewest and most questions, and the share of dialogues to summarise. What does not fit a row is left out."""

    families: tuple[int, int] | None = None
    questions: tuple[int, int] = (6, 20)
    summaries: float = 0.12


def row_shape(length: int) -> RowShape:
    """Return the shape of rows of `length` tokens. Rows of 2,048 have 1 to 6 families and 13 to 68 questions, those of
    4,096 3 to 8 families (8 have some 40 passages) and 27 to 136 questions."""
    if length <= DEMO_LENGTH:
        return RowShape()
    most = min(MOST_FAMILIES, length // TOKENS_PER_FAMILY)
    return RowShape((max(1, most - 5), most), (length // 150, length // 30), summaries=0.06)


@dataclass(frozen=True)
class WorldRows:
    """What a worker needs. `bos` is the id before a prompt, or None; `length` is that of a row, in
    tokens."""

    tokenizer_json: str
    bos: int | None
    padding: int
    length: int

    def shard(self, seed: int, rows: int) -> Rows:
        """Return `rows` rows of one random stream; prompts that are too long are drawn again."""
        rng, encode, shape = Random(seed), self._encode(), row_shape(self.length)
        made: list[Row] = []
        while len(made) < rows:
            row = episode_row(draw_episode(rng, shape), encode, self.bos, self.length)
            if row is not None:
                made.append(row)
        return pad_rows(made, self.length, self.padding)

    def check(self) -> None:
        """Raise ValueError if too few worlds fit the rows: drawing them again and again would not end."""
        rng, encode, shape = Random(TRAINING_SEEDS.start), self._encode(), row_shape(self.length)
        drawn = (draw_episode(rng, shape) for _ in range(CHECKED_WORLDS))
        fitting = sum(episode_row(episode, encode, self.bos, self.length) is not None for episode in drawn)
        if fitting < CHECKED_WORLDS // 2:
            raise ValueError(
                f"only {fitting} of {CHECKED_WORLDS} worlds fit {self.length} tokens: raise --max-length or --lengths "
                "(to about 1,024 with the demo model's tokenizer), or use a model with more positions"
            )

    def _encode(self) -> Encode:
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def draw_episode(rng: Random, shape: RowShape) -> Episode:
    """Return a dialogue to summarise, or a world with some of its questions in random order."""
    if rng.random() < shape.summaries:
        return summary_episode(rng)
    families = None if shape.families is None else rng.randint(*shape.families)
    episode = question_episode(rng, families)
    questions = list(episode.questions)
    rng.shuffle(questions)
    return Episode(episode.instruction, episode.passages, tuple(questions[: rng.randint(*shape.questions)]))


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


def development_rows(source: WorldRows, rows: int) -> Rows:
    """Return rows of development worlds: training may be stopped by them, and nothing is reported on them."""
    return source.shard(DEVELOPMENT.seed(DEVELOPMENT_WORLD), rows)


def share_out(seeds: Sequence[int], shares: Sequence[float]) -> list[tuple[int, int]]:
    """Return (number of a share, seed) for every seed: in any beginning of the list, each share has its part of the
    seeds to within one."""
    total, given, jobs = sum(shares), [0] * len(shares), []
    for count, seed in enumerate(seeds, 1):
        behind = [count * share / total - has for share, has in zip(shares, given, strict=True)]
        chosen = behind.index(max(behind))
        given[chosen] += 1
        jobs.append((chosen, seed))
    return jobs


_sources: Sequence[WorldRows]  # in a worker process


def _start_worker(sources: Sequence[WorldRows]) -> None:
    global _sources
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is a process
    _sources = sources


def _make_rows(job: tuple[int, int]) -> Rows:
    return _sources[job[0]].shard(job[1], ROWS_PER_SEED)


@contextmanager
def world_shards(
    sources: Sequence[WorldRows], jobs: Sequence[tuple[int, int]], workers: int
) -> Iterator[Iterator[Rows]]:
    """Yield shards as they are made, in no fixed order; without workers, in this process when they are asked for. A job
    is the number of a source and a seed.

    The iterator of a pool has `next(timeout)`, as `multiprocessing.Pool.imap_unordered` says.
    """
    if workers == 0:
        yield (sources[number].shard(seed, ROWS_PER_SEED) for number, seed in jobs)
        return
    # Spawned, as this process has threads and perhaps a GPU.
    pool: Any = multiprocessing.get_context("spawn").Pool(workers, _start_worker, (sources,))
    with pool:
        yield pool.imap_unordered(_make_rows, jobs)
