"""The settings of a training run, and what follows from them at a step: the share that is over, the learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_blend.finetune.masks import MaskShares

FINAL_RATE = 0.02  # share of the peak learning rate


@dataclass(frozen=True)
class TrainingPlan:
    """The settings of a training run.

    `minutes` and `steps`: the first limit that is reached ends training; None for no limit, but not both. The learning
    rate rises over `warmup_steps` and falls linearly over the last `decay_share` of the minutes or steps. While less
    than `short_share` of the training is over, only the shortest rows are drawn. `shares` is None if nothing is ever
    reused: the model then runs without masks. `distill` is the weight of the teacher's distribution on answer tokens,
    beside 1 for the next token. A batch is computed in `accumulate` parts, one after another, which changes nothing but
    the memory. `compile` uses torch.compile. Every `evaluate_steps` the model is asked about development rows, where
    there are any; training ends as soon as a share `target` of their answer tokens is right. `pause_minutes` ends this
    process earlier, with a checkpoint to go on from.
    """

    batch_size: int = 64
    minutes: float | None = None
    steps: int | None = None
    learning_rate: float = 6e-4
    warmup_steps: int = 60
    decay_share: float = 0.6
    short_share: float = 0.0
    weight_decay: float = 0.02
    shares: MaskShares | None = MaskShares()  # noqa: RUF009 - frozen
    distill: float = 0.0
    accumulate: int = 1
    checkpoint_activations: bool = False
    compile: bool = False
    save_minutes: float | None = None
    pause_minutes: float | None = None
    evaluate_steps: int = 500
    target: float | None = None
    log_steps: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if self.minutes is None and self.steps is None:
            raise ValueError("give --minutes or --steps: training has no other end")
        for name in ("batch_size", "minutes", "steps", "learning_rate", "save_minutes", "pause_minutes", "log_steps"):
            self._check(name, 0 < (1 if getattr(self, name) is None else getattr(self, name)) < math.inf, "above 0")
        for name in ("accumulate", "evaluate_steps"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup_steps", "weight_decay", "distill"):
            self._check(name, 0 <= getattr(self, name) < math.inf, "at least 0")
        self._check("target", self.target is None or 0 < self.target <= 1, "in (0, 1]")
        self._check("decay_share", 0 < self.decay_share <= 1, "in (0, 1]")
        self._check("short_share", 0 <= self.short_share < 1, "in [0, 1)")
        if self.batch_size % self.accumulate:
            raise ValueError(f"--batch-size {self.batch_size} must be a multiple of --accumulate {self.accumulate}")

    def _check(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be a number {what}")

    def done(self, seconds: float, step: int) -> float:
        """Return the share of the training that is over, after `step` steps."""
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return max(by_time, step / self.steps if self.steps else 0.0)

    def rate(self, step: int, done: float) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        rising = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.learning_rate * rising * max(FINAL_RATE, min(1.0, (1 - done) / self.decay_share))
