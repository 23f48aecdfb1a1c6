"""The verdict on a model: which rule, ratio and company keep its answers at the least work, or that none does.

A setting passes on a data set if two things hold:

- **Agreement** is at least `min_agreement`: that many of its greedy answers are full prefill's, token by token. Only if
  the whole interval of the agreement is, the setting passes for certain.
- **F1** is at most `max_f1_loss` below full prefill's, or the paired interval of the difference goes through zero.

It has to pass on every data set, and so has the same rule in the same company at every larger ratio that was measured:
a small ratio that is better than a larger one was lucky. Of those that pass, the one that computes least is
recommended.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from vllm_blend.quality.measures import FULL
from vllm_blend.quality.settings import PLAIN_REUSE, Setting
from vllm_blend.quality.table import Row

LEAST_SCORE = 0.1  # F1 of full prefill: what a model says that can hardly answer says little about its answers
MOST_QUESTIONS = 100_000  # more would be asked for if the agreement were hardly above what it must be


class State(IntEnum):
    """How a setting does, from best to worst. `check-model` ends with the status of the best one: see `STATUS`."""

    PASSES = 0
    UNCERTAIN = 1
    FAILS = 2


STATUS = {State.PASSES: 0, State.UNCERTAIN: 3, State.FAILS: 1}  # exit statuses; 2 is bad input


@dataclass(frozen=True)
class Thresholds:
    min_agreement: float = 0.8
    max_f1_loss: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.min_agreement <= 1:
            raise ValueError(f"--min-agreement {self.min_agreement} is a share of the answers: use a number in (0, 1]")
        if not 0 <= self.max_f1_loss <= 1:
            raise ValueError(f"--max-f1-loss {self.max_f1_loss} is a difference of F1: use a number in [0, 1]")


@dataclass(frozen=True)
class Judged:
    """A setting, what became of it on all data sets, and its work as a share of full prefill, mean over these."""

    setting: Setting
    state: State
    work: float


@dataclass(frozen=True)
class Verdict:
    """The verdict: the state of the best setting, that setting (None if all fail), and sentences that say so."""

    state: State
    best: Setting | None
    text: str
    judged: tuple[Judged, ...] = ()

    @property
    def status(self) -> int:
        """Return the exit status of the command."""
        return STATUS[self.state]


def decide(rows: Sequence[Row], settings: Sequence[Setting], limits: Thresholds) -> Verdict:
    """Return the verdict from the rows of all data sets."""
    unable = [row for row in rows if row["setting"] == FULL and row["f1"] < LEAST_SCORE]
    if unable:
        return Verdict(State.FAILS, None, "\n".join(map(_unable, unable)))
    judged = tuple(_judge_all(rows, settings, limits))
    best = min(judged, key=lambda each: (each.state, each.work))
    if best.state is State.FAILS:
        return Verdict(State.FAILS, None, _refusal(rows, judged, limits), judged)
    own = [row for row in rows if row["setting"] == best.setting.name]
    if best.state is State.PASSES:
        heading = "Blend this model by"
    else:
        heading = "More questions are needed to say so, but this may be enough:"
    lines = [f"{heading} {_as_options(best.setting)}, for {100 * best.work:.1f}% of full prefill's work."]
    lines += [f"  {_evidence(rows, row)}" for row in own]
    if best.state is State.UNCERTAIN:
        lines.append(f"  {_more_questions(own, limits)}")
    return Verdict(best.state, best.setting, "\n".join(lines), judged)


def judge(row: Row, limits: Thresholds) -> State:
    """Return how a setting does on one data set."""
    gain, low, high = row["f1_gain"], row["f1_gain_low"], row["f1_gain_high"]
    keeps_score = gain >= -limits.max_f1_loss or low <= 0 <= high
    if not keeps_score or row["agreement"] < limits.min_agreement:
        return State.FAILS
    return State.PASSES if row["agreement_low"] >= limits.min_agreement else State.UNCERTAIN


def _judge_all(rows: Sequence[Row], settings: Sequence[Setting], limits: Thresholds) -> list[Judged]:
    own = {setting: [row for row in rows if row["setting"] == setting.name] for setting in settings}
    states = {setting: max(judge(row, limits) for row in found) for setting, found in own.items()}
    judged = []
    for setting in settings:
        larger = [
            s for s in settings if (s.rule, s.company) == (setting.rule, setting.company) and s.ratio > setting.ratio
        ]
        lucky = any(states[other] is State.FAILS for other in larger)
        work = statistics.fmean(row["work"] for row in own[setting])
        judged.append(Judged(setting, State.FAILS if lucky else states[setting], work))
    return judged


def _as_options(setting: Setting) -> str:
    """Return a setting as options of an engine."""
    ratio = "" if setting.rule == PLAIN_REUSE else f" --blend-recompute-ratio {setting.ratio:g}"
    return f"--blend-selector '{setting.rule}'{ratio} --blend-encoding-context {setting.company}"


def _evidence(rows: Sequence[Row], row: Row) -> str:
    full = next(r for r in rows if r["setting"] == FULL and r["dataset"] == row["dataset"])
    low, high = (100 * row[f"f1_gain_{end}"] for end in ("low", "high"))
    return (
        f"{row['dataset']}: {100 * row['agreement']:.0f}% of {row['questions']} answers are full prefill's (95% "
        f"interval {100 * row['agreement_low']:.0f} to {100 * row['agreement_high']:.0f}), F1 {100 * row['f1']:.1f} of "
        f"{100 * full['f1']:.1f} ({low:+.1f} to {high:+.1f})"
    )


def _more_questions(rows: Sequence[Row], limits: Thresholds) -> str:
    """Return how many questions of each data set would show that the agreement is enough, if it stayed what it is."""
    needed = 0.0
    for row in rows:
        spare = row["agreement"] - limits.min_agreement
        variance = max(row["agreement"] * (1 - row["agreement"]), 1 / row["questions"])
        needed = max(needed, math.inf if spare <= 0 else 4 * variance / spare**2)
    if needed > MOST_QUESTIONS:
        return "Ask many more questions, or allow a smaller agreement (--min-agreement)."
    return f"Ask about {math.ceil(needed / 50) * 50} questions of each data set."


def _refusal(rows: Sequence[Row], judged: Sequence[Judged], limits: Thresholds) -> str:
    """Return that nothing passes, with the setting that came nearest."""
    named: dict[str, list[Row]] = {}
    for row in rows:
        named.setdefault(row["setting"], []).append(row)
    nearest = max(judged, key=lambda each: min(row["agreement"] for row in named[each.setting.name]))
    lines = [
        f"Do not blend this model: no setting keeps {100 * limits.min_agreement:g}% of full prefill's answers on every "
        f"data set without losing more than {100 * limits.max_f1_loss:g} points of F1. The nearest is "
        f"{nearest.setting.name}:",
        *(f"  {_evidence(rows, row)}" for row in named[nearest.setting.name]),
    ]
    return "\n".join(lines)


def _unable(row: Row) -> str:
    return (
        f"{row['dataset']}: cannot tell: full prefill itself has F1 {100 * row['f1']:.1f}, so its answers are hardly "
        "worth keeping. Use a data set that the model can answer, in the form it knows (see --style)"
    )


def as_json(verdict: Verdict, rows: Sequence[Row], limits: Thresholds) -> dict[str, Any]:
    """Return a verdict for a file: what `entrypoints/verdicts.py` reads, and what it rests on."""
    best = verdict.best
    return {
        "state": verdict.state.name.lower(),
        "text": verdict.text,
        "best": None if best is None else vars(best),
        "limits": vars(limits),
        "settings": [
            vars(each.setting) | {"state": each.state.name.lower(), "work": each.work} for each in verdict.judged
        ],
        "data": {
            row["dataset"]: {"questions": row["questions"], "f1": row["f1"]} for row in rows if row["setting"] == FULL
        },
    }
