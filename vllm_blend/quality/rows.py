"""Turn measurements into rows of plain numbers: one per data set, question kind, setting and ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_blend.quality.catalogue import CACHEBLEND
from vllm_blend.quality.intervals import Bootstrap, Estimate
from vllm_blend.quality.questions import ALL
from vllm_blend.quality.settings import PLAIN_REUSE, Run, RunKey
from vllm_blend.quality.sweep import METRICS, Measured, Outcome

__all__ = ["ALL", "FULL", "estimate_columns", "make_rows", "shortened"]

FULL = "full prefill"


@dataclass(frozen=True)
class _Scope:
    """Some questions of a data set."""

    measured: Measured
    kind: str
    where: np.ndarray  # indices of the questions
    bootstrap: Bootstrap

    def values(self, outcome: Outcome, name: str) -> np.ndarray:
        values: np.ndarray = outcome.values(name)[self.where]
        return values


def make_rows(
    measured: Sequence[Measured], runs: Sequence[Run], seed: int = 0, intervals: type[Bootstrap] = Bootstrap
) -> list[dict[str, Any]]:
    """Return the rows. Scores and shares are from 0 to 1, with `_low` and `_high` for their intervals.

    `token_layers` is a share of full prefill's on the same questions, in rows of a kind too on those of the whole data
    set. `encoding` is the same share for computing the stored chunks, over all runs of the setting's engine. `kept` is
    the share of full prefill's score in the data set's metric, and `recovered` the share of the loss of `PLAIN_REUSE`
    that is made good; `kept_exact_match` and `recovered_exact_match` are the same for exact match. `over_cacheblend` is
    the metric's difference to `CACHEBLEND` at the same ratio. `same_as` names a setting that was measured in place of
    this one, as both compute the same at this ratio. Runs that were not measured are left out. A value that is not
    finite (`kl` of a model that computes NaN) is None, as JSON has no word for it.
    """
    return [row for one in measured for scope in _scopes(one, seed, intervals) for row in _rows_of(scope, runs)]


def shortened(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows for a file, with six digits of each number, which are more than are significant."""
    return [{name: float(f"{v:.6g}") if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def _scopes(one: Measured, seed: int, intervals: type[Bootstrap]) -> list[_Scope]:
    samples = one.questions.samples
    kinds = [ALL, *one.questions.kinds]
    wheres = [np.array([i for i, s in enumerate(samples) if kind in (ALL, s.kind)]) for kind in kinds]
    return [_Scope(one, kind, where, intervals(len(where), seed)) for kind, where in zip(kinds, wheres, strict=True)]


def _rows_of(scope: _Scope, runs: Sequence[Run]) -> list[dict[str, Any]]:
    one = scope.measured
    reuse = next((one.runs.get(run.key) for run in runs if run.setting is PLAIN_REUSE), None)
    cacheblend = {run.ratio: one.runs[run.key] for run in runs if run.setting is CACHEBLEND and run.key in one.runs}
    encoding: dict[str, float] = {}
    for group, outcome in ((key[0], outcome) for key, outcome in one.runs.items()):
        encoding[group] = encoding.get(group, 0.0) + outcome.encoding
    rows = [_row(scope, FULL, None, one.full, reuse, None)]
    first: dict[RunKey, str] = {}
    for run in runs:
        if run.key not in one.runs:
            continue
        row = _row(scope, run.setting.name, run.ratio, one.runs[run.key], reuse, cacheblend.get(run.ratio))
        row["encoding"] = encoding[run.group] / one.full.token_layers
        row["same_as"] = first.get(run.key)
        first.setdefault(run.key, run.setting.name)
        rows.append(row)
    return rows


def _row(
    scope: _Scope,
    setting: str,
    ratio: float | None,
    outcome: Outcome,
    reuse: Outcome | None,
    cacheblend: Outcome | None,
) -> dict[str, Any]:
    questions, bootstrap = scope.measured.questions, scope.bootstrap
    metric = questions.style.metric
    row: dict[str, Any] = {"dataset": questions.name, "kind": scope.kind, "setting": setting, "ratio": ratio}
    row |= {"samples": len(scope.where), "metric": metric}
    row["token_layers"] = outcome.token_layers / scope.measured.full.token_layers
    row |= {"encoding": 0.0, "same_as": None}
    for name in (*METRICS, "same_answer"):
        row |= estimate_columns(name, bootstrap.score(scope.values(outcome, name)))
    row |= estimate_columns("kl", bootstrap.mean(scope.values(outcome, "kl")))
    for end, name in (("", metric), ("_exact_match", "exact_match")):
        ours, full = scope.values(outcome, name), scope.values(scope.measured.full, name)
        row |= estimate_columns(f"kept{end}", bootstrap.ratio(ours, full))
        recovered = None if reuse is None else bootstrap.recovered(ours, scope.values(reuse, name), full)
        row |= estimate_columns(f"recovered{end}", recovered)
    over = (
        None if cacheblend is None else bootstrap.difference(*(scope.values(o, metric) for o in (outcome, cacheblend)))
    )
    return row | estimate_columns("over_cacheblend", over)


def estimate_columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return an estimate and its interval as columns of a row."""
    if estimate is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    columns = {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return {name: v if v is not None and math.isfinite(v) else None for name, v in columns.items()}
