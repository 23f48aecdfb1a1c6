"""Measures as rows of plain numbers, one for each way to answer a data set, and as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_blend.quality.intervals import Bootstrap, Estimate, share
from vllm_blend.quality.measures import AGAIN, FULL, LISTS, Measured, Measures
from vllm_blend.quality.settings import Setting

Row = dict[str, Any]

LEGEND = """\
Shares are in percent, with 95% intervals over the questions in brackets. `work`: all that the prefill computed, as a
share of full prefill, with the question and with passes that only choose tokens; computing the stored chunks is apart.
`F1`, `exact match`: with the data set's answers, and the difference to full prefill. `agreement`: the share of greedy
answers that are full prefill's, token by token. `KL`: how far the distributions of the answer's tokens are from full
prefill's while both say full prefill's answer, in nats a token; `first`: of the first token alone. `full prefill, other
batches` differs by rounding: no setting can be told apart that is as near."""


def make_rows(measured: Measured, seed: int = 0, over: Setting | None = None) -> list[Row]:
    """Return a row for each way to answer. Shares are from 0 to 1, and a value has its interval beside it, `_low` and
    `_high`; `_gain` is the difference to full prefill, and `encoding` what computing the chunks of its company took, as
    a share of full prefill. With `over`, `agreement_over` and `kl_over` are the differences
    to that setting. A number that is not finite is None, as JSON has no word for it."""
    bootstrap = Bootstrap(len(measured.questions.samples), seed)
    ways: list[tuple[str, Setting | None, Measures]] = [(FULL, None, measured.full), (AGAIN, None, measured.again)]
    ways += [(setting.name, setting, measures) for setting, measures in measured.settings.items()]
    base = None if over is None else measured.settings.get(over)
    return [_row(measured, name, setting, measures, bootstrap, base) for name, setting, measures in ways]


def _row(
    measured: Measured,
    name: str,
    setting: Setting | None,
    measures: Measures,
    bootstrap: Bootstrap,
    base: Measures | None,
) -> Row:
    agreed = measures.values("agreement")
    row: Row = {"dataset": measured.questions.name, "setting": name, "questions": len(agreed)}
    row |= {key: None if setting is None else getattr(setting, key) for key in ("rule", "ratio", "company")}
    row["work"] = measures.work / measured.full.work
    row["encoding"] = 0.0 if setting is None else measured.encoding[setting.company] / measured.full.work
    for name in ("f1", "exact_match"):
        row |= columns(name, bootstrap.mean(measures.values(name)))
        row |= columns(f"{name}_gain", bootstrap.difference(measures.values(name), measured.full.values(name)))
    row |= columns("agreement", share(int(agreed.sum()), len(agreed)))
    row |= columns("kl", bootstrap.mean(measures.values("kl")))
    row |= columns("first_kl", bootstrap.mean(measures.values("first_kl")))
    for name in ("agreement", "kl") if base is not None else ():
        assert base is not None
        row |= columns(f"{name}_over", bootstrap.difference(measures.values(name), base.values(name)))
    return row


def columns(name: str, estimate: Estimate) -> dict[str, float | None]:
    """Return an estimate and its interval as columns of a row."""
    found = {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return {key: float(f"{value:.6g}") if math.isfinite(value) else None for key, value in found.items()}


def columns_of(measured: Measured) -> dict[str, Any]:
    """Return what was measured of every question, for a file: the ids, and for each way to answer a list of texts and
    lists of numbers in the same order."""
    ways = {FULL: measured.full, AGAIN: measured.again}
    ways |= {setting.name: measures for setting, measures in measured.settings.items()}
    found: dict[str, Any] = {"id": [sample.sample_id for sample in measured.questions.samples]}
    for name, measures in ways.items():
        found[name] = {"text": measures.texts} | {key: [*map(_short, getattr(measures, key))] for key in LISTS}
    return found


def render(rows: Sequence[Row]) -> str:
    """Return the rows of one data set as a Markdown table."""
    compared = any("kl_over" in row for row in rows)
    heads = ["setting", "work", "F1", "exact match", "agreement", "KL", "first"]
    heads += ["agreement, difference", "KL, difference"] if compared else []
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        cells = [row["setting"], f"{100 * row['work']:.1f}"]
        cells += [_score(row, "f1"), _score(row, "exact_match")]
        cells += [_interval(row, "agreement", 100, 1), _interval(row, "kl", 1, 3), _number(row["first_kl"], 1, 3)]
        cells += [_interval(row, "agreement_over", 100, 1), _interval(row, "kl_over", 1, 3)] if compared else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _score(row: Mapping[str, Any], name: str) -> str:
    """Return a score and its difference to full prefill; of full prefill itself, the score's own interval."""
    if row["setting"] == FULL:
        return _interval(row, name, 100, 1)
    low, high = (_number(row[f"{name}_gain_{end}"], 100, 1, "+") for end in ("low", "high"))
    return f"{_number(row[name], 100, 1)}, {_number(row[f'{name}_gain'], 100, 1, '+')} ({low} to {high})"


def _interval(row: Mapping[str, Any], name: str, scale: float, digits: int) -> str:
    value, low, high = (_number(row[f"{name}{end}"], scale, digits) for end in ("", "_low", "_high"))
    return f"{value} ({low} to {high})"


def _number(value: float | None, scale: float, digits: int, sign: str = "") -> str:
    return "?" if value is None else f"{round(scale * value, digits) + 0.0:{sign}.{digits}f}"


def _short(value: float) -> float | None:
    """Return a number with four digits, which are more than are significant."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
