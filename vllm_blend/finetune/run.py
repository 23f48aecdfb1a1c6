"""One training run from its parts: rows, model, teacher, checkpoints, and the model directory at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_blend.finetune.evaluation import Development
from vllm_blend.finetune.loop import Surroundings, TrainingProgress, train
from vllm_blend.finetune.lora import Adapter
from vllm_blend.finetune.plan import TrainingPlan
from vllm_blend.finetune.replicas import ALONE, Replicas
from vllm_blend.finetune.saving import save_model
from vllm_blend.finetune.sources import Source
from vllm_blend.finetune.state import TrainingState, end_state, save_state
from vllm_blend.finetune.teacher import Teacher


@dataclass(frozen=True)
class Student:
    """What is trained: a causal model of transformers on its device, its tokenizer, the dtype that it is saved in, and
    the adapter if only that is trained."""

    model: Any
    tokenizer: Any
    dtype: torch.dtype
    adapter: Adapter | None = None

    def save(self, output: Path) -> None:
        """Write a model directory, with the adapter merged into the weights."""
        merged = None if self.adapter is None else self.adapter.merged_weights()
        save_model(self.model, self.tokenizer, self.dtype, output, merged)


def run_training(
    student: Student,
    source: Source,
    plan: TrainingPlan,
    output: Path,
    say: Callable[[object], None],
    teacher: Teacher | None = None,
    resumed: TrainingState | None = None,
    replicas: Replicas = ALONE,
) -> TrainingProgress:
    """Train until the plan ends, or pause; write the model into `output`, and a checkpoint beside it until the end. Of
    several replicas, rank 0 writes. Raises ValueError if they cannot share a batch."""
    device = student.model.device
    rows = replicas.share_of("--batch-size", plan.batch_size)
    _check_rows(rows, source.lengths, replicas)
    pools = source.pools(rows, device, plan.seed + replicas.rank + (0 if resumed is None else resumed.step))
    evaluate = None
    if source.development:
        sizes = [max(1, pools.rows_in_batch(pool) // plan.accumulate) for pool in pools.pools]
        by_length = {pool.length: size for pool, size in zip(pools.pools, sizes, strict=True)}
        asked = Development(source.development, [by_length[rows.ids.shape[1]] for rows in source.development], device)

        def evaluate() -> dict[str, float]:
            return asked.accuracy(student.model, plan.shares)

    def save(state: TrainingState) -> None:
        student.save(output)
        save_state(state, output)

    with source.shards as shards:
        around = Surroundings(say, save, evaluate)
        last = train(student.model, pools, shards, plan, around, teacher, resumed, replicas)
    if not replicas.leads:
        return last
    if last.ended == "paused":
        say(f"paused after {last.step} steps ({last.seconds:.0f} s): the same command with --resume goes on")
        return last
    student.save(output)
    end_state(output)
    epochs = max(pool.epoch for pool in pools.pools)
    say(f"{last.step} steps over {len(pools)} prompts (pass {epochs}), {last.ended}; model in {output}")
    return last


def _check_rows(rows: int, lengths: Sequence[int], replicas: Replicas) -> None:
    """Raise ValueError if the part of a batch that a replica has, in tokens, has no room for the longest rows."""
    needed = -(-max(lengths) // min(lengths))
    if replicas.size > 1 and rows < needed:
        raise ValueError(
            f"--batch-size {rows * replicas.size} has too few tokens for rows of {max(lengths)} in each of "
            f"{replicas.size} processes: use {needed * replicas.size} or more"
        )
