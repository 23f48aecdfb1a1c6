"""The training loop: a model of transformers, rows that arrive while it runs, until the minutes or the steps are up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import TimeoutError as NotYet
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from vllm_blend.finetune.attention import reuse_arguments
from vllm_blend.finetune.masks import KINDS, MaskShares, Reuse, draw_reuse
from vllm_blend.finetune.rows import RowBatch, RowPool, Rows

FIRST_BATCHES = 8  # batches of rows to begin with, while more are being made
FINAL_RATE = 0.02  # share of the peak learning rate
BETAS = (0.9, 0.95)
LONGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class TrainingPlan:
    """The settings of a training run. `minutes` and `steps`: the first limit that is reached ends training; None for no
    limit, but not both. The learning rate rises over `warmup_steps` and falls linearly over the last `decay_share` of
    the minutes or steps. `shares` is None if nothing is ever reused: the model then runs without masks. `compile` uses
    torch.compile."""

    batch_size: int = 64
    minutes: float | None = None
    steps: int | None = None
    learning_rate: float = 6e-4
    warmup_steps: int = 60
    decay_share: float = 0.6
    weight_decay: float = 0.02
    shares: MaskShares | None = MaskShares()  # noqa: RUF009 - frozen
    compile: bool = False
    save_minutes: float | None = None
    log_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise ValueError("give --minutes or --steps: training has no other end")
        for name in ("batch_size", "minutes", "steps", "learning_rate", "save_minutes", "log_steps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: it must be a number above 0")
        for name in ("warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be a number, at least 0"
                )

    def done(self, seconds: float, step: int) -> float:
        """Return the share of the training that is over, after `step` steps."""
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return max(by_time, step / self.steps if self.steps else 0.0)

    def rate(self, step: int, done: float) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        rising = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * rising * max(FINAL_RATE, min(1.0, (1 - done) / self.decay_share))


@dataclass(frozen=True)
class TrainingProgress:
    """The state after `step` steps. `accuracy` is that of answer tokens in the last batch, by kind of mask in it."""

    step: int
    seconds: float
    loss: float
    accuracy: dict[str, float]

    def __str__(self) -> str:
        right = ", ".join(f"{kind} {100 * share:.1f}%" for kind, share in self.accuracy.items())
        return f"step {self.step}  {self.seconds:.0f} s  loss {self.loss:.4f}  answer tokens right: {right}"


def train(
    model: PreTrainedModel,
    pool: RowPool,
    arriving: Iterator[Rows],
    plan: TrainingPlan,
    report: Callable[[TrainingProgress], None],
    save: Callable[[], None] = lambda: None,
) -> TrainingProgress:
    """Train `model` in place, on its device. `save` is called every `save_minutes`, but not at the end. Raises
    ValueError if the loss of a step that is reported or saved is not finite.

    On a GPU, products are computed in bfloat16; weights and optimizer are float32 (the model must be).
    """
    device = model.device
    half = device.type == "cuda"
    if half:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward needs queries as wide as values
    drawing = torch.Generator(device).manual_seed(plan.seed)
    optimizer = _optimizer(model, plan, fused=half)
    forward: Any = torch.compile(model) if plan.compile else model
    model.train()
    all_here = _receive(pool, arriving, FIRST_BATCHES * plan.batch_size)
    start = saved = time.perf_counter()
    step, progress = 0, TrainingProgress(0, 0.0, float("nan"), {})
    while (done := plan.done(time.perf_counter() - start, step)) < 1 or step == 0:
        if not all_here:
            all_here = _receive(pool, arriving)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step, done)
        batch = pool.draw(plan.batch_size)
        reuse = None if plan.shares is None else draw_reuse(batch, plan.shares, drawing)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            arguments = {"input_ids": batch.ids}
            if reuse is not None:
                mask_dtype = torch.bfloat16 if half else torch.float32
                arguments = reuse_arguments(model, batch.ids, batch.chunks, reuse, mask_dtype)
            logits = forward(use_cache=False, **arguments).logits[:, : batch.ids.shape[1]]
        loss = weighted_loss(logits, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if step % plan.log_steps == 0 or step in (1, 10) or plan.done(now - start, step) >= 1:
            progress = TrainingProgress(step, now - start, loss.item(), accuracies(logits, batch, reuse))
            report(progress)
            _check_loss(progress.loss, step)
        if plan.save_minutes is not None and now - saved > 60 * plan.save_minutes:
            _check_loss(loss.item(), step)
            save()
            saved = time.perf_counter()
    return progress


def _check_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss} after {step} steps, and the model is ruined: lower --learning-rate, or raise "
            "--warmup-steps"
        )


def weighted_loss(logits: torch.Tensor, batch: RowBatch) -> torch.Tensor:
    """Return the mean cross-entropy of the next token, by the tokens' weights. `logits` is [batch, length,
    vocabulary]."""
    weights, targets = batch.weights[:, 1:], batch.ids[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.view_as(weights) * weights).sum() / weights.sum()


@torch.no_grad()
def accuracies(logits: torch.Tensor, batch: RowBatch, reuse: Reuse | None) -> dict[str, float]:
    """Return the share of answer tokens that the model finds likeliest, by kind of mask."""
    answers = batch.answers[:, 1:]
    right = (logits[:, :-1].argmax(-1) == batch.ids[:, 1:]) & answers
    kinds = torch.zeros(len(answers), dtype=torch.int64, device=answers.device) if reuse is None else reuse.kinds
    counted = [(name, answers[kinds == kind].sum().item(), right[kinds == kind]) for kind, name in enumerate(KINDS)]
    return {name: hits.sum().item() / total for name, total, hits in counted if total}


def _optimizer(model: PreTrainedModel, plan: TrainingPlan, fused: bool) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=BETAS, fused=fused)


def _receive(pool: RowPool, arriving: Iterator[Rows], at_least: int = 0) -> bool:
    """Put the rows that have arrived into the pool, and wait until it has `at_least`; return whether all have come."""
    ready = getattr(arriving, "next", None)  # a pool of processes has it; other iterators make rows on demand
    while True:
        try:
            pool.add(next(arriving) if ready is None or len(pool) < at_least else ready(timeout=0))
        except NotYet:
            return False
        except StopIteration:
            return True
