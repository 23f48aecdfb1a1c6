"""Tables of held-out measurements, from their files alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_blend.quality.held_out_file import Answered, Cell, HeldOut
from vllm_blend.quality.intervals import Bootstrap, SmallSampleIntervals
from vllm_blend.quality.report import format_about, interval_cell, percent
from vllm_blend.quality.rows import FULL, estimate_columns
from vllm_blend.quality.settings import PLAIN_REUSE

LEGEND = """\
Synthetic worlds in MuSiQue's format (titled ones: 2WikiMultihopQA's). Exact match, shares and their 95% intervals are
in percent. `token-layers`: all that the prefill put through the model, passes that only choose tokens and the
question included, as a share of full prefill; computing the stored chunks is apart, and of an oracle, so is finding
out what it names. `over {baseline}`: the difference over the same questions. `kept`: the share of full prefill's
score. Intervals are over worlds, as questions about one world share its passages. Those of scores and differences are
percentiles of a bootstrap; those of `kept` also allow for a world that is worse, or better, than all that were seen
(`vllm_blend/quality/intervals.py`)."""


@dataclass(frozen=True)
class Line:
    """A run, with full prefill's answers to the same questions in the same file."""

    run: Answered
    full: Answered
    name: str


@dataclass(frozen=True)
class Section:
    """What was measured over the same questions by the same model."""

    title: str
    cell: Cell
    lines: list[Line]

    @property
    def counts(self) -> str:
        """Return how many questions, worlds and passages there are, in words."""
        worlds, (fewest, most) = len(set(self.cell.worlds)), self.cell.passages
        return f"{len(self.cell.questions)} questions about {worlds} worlds, {fewest} to {most} passages"


def render(files: Sequence[HeldOut], over: str | None = None, seed: int = 0) -> str:
    """Return the document: a table for each model and cell. `over` is "SETTING" or "SETTING@RATIO", which all others
    are compared with (None: plain reuse). Raises ValueError if no file has it, or the files hold no answers."""
    sections = find_sections(files)
    check_baseline(over, [(line.run.setting, line.run.ratio) for section in sections for line in section.lines])
    chosen = [_find(section, over or PLAIN_REUSE.name) for section in sections]
    shown = over or PLAIN_REUSE.name
    parts = ["# Held-out questions", textwrap.fill(LEGEND.format(baseline=shown), 120)]
    for section, baseline in zip(sections, chosen, strict=True):
        parts += [f"## {section.title}: {section.counts}", _table(make_rows(section, baseline, seed), shown)]
    return "\n\n".join([*parts, *describe(files)]) + "\n"


def describe(files: Sequence[HeldOut]) -> list[str]:
    """Return the paragraphs that say how files were measured."""
    parts = ["## How it was measured"]
    for held_out in files:
        about = {name: value for name, value in held_out.about.items() if name not in ("command", "runs")}
        left_out = [question for cell in held_out.cells for question in cell.left_out]
        seeds = [f"{min(cell.worlds)} to {max(cell.worlds)} ({cell.name})" for cell in held_out.cells if cell.questions]
        about |= {"seeds of the worlds": seeds, "left out as too long": left_out}
        parts.append(f"    {held_out.about['command']}\n\n" + "\n".join(format_about(about)))
    return parts


def make_rows(section: Section, baseline: Answered | None, seed: int) -> list[dict[str, Any]]:
    """Return a row of plain numbers for each line, shares from 0 to 1, with `_low` and `_high` for intervals."""
    cell = section.cell
    bootstrap = Bootstrap(len(cell.questions), seed, cell.worlds)
    wide = SmallSampleIntervals(len(cell.questions), seed, cell.worlds)
    kinds = np.array(cell.kinds)
    rows = []
    for line in section.lines:
        ours, full = line.run.correct.astype(float), line.full.correct.astype(float)
        row: dict[str, Any] = {"setting": line.name, "ratio": line.run.ratio, "token_layers": line.run.token_layers}
        row |= estimate_columns("exact_match", bootstrap.score(ours))
        row["kinds"] = {kind: float(ours[kinds == kind].mean()) for kind in sorted(set(cell.kinds))}
        row |= estimate_columns("kept", None if line.run is line.full else wide.ratio(ours, full))
        compared = baseline is not None and baseline is not line.run
        difference = bootstrap.difference(ours, baseline.correct.astype(float)) if compared and baseline else None
        rows.append(row | estimate_columns("over", difference))
    return rows


def _table(rows: Sequence[dict[str, Any]], baseline: str) -> str:
    kinds = list(rows[0]["kinds"]) if rows else []
    heads = ["setting", "ratio", "token-layers", "exact match", *kinds, "kept", f"over {baseline}"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{100 * row['ratio']:g}%"
        cells = [row["setting"], ratio, percent(row["token_layers"]), interval_cell(row, "exact_match")]
        cells += [percent(row["kinds"][kind]) for kind in kinds]
        lines.append(f"| {' | '.join([*cells, interval_cell(row, 'kept'), interval_cell(row, 'over')])} |")
    return "\n".join(lines)


def find_sections(files: Sequence[HeldOut]) -> list[Section]:
    """Return what files have measured, together where questions and model are the same. Raises ValueError if they hold
    no answers."""
    found: dict[tuple[Any, ...], Section] = {}
    for held_out in files:
        about = held_out.about
        for cell in held_out.cells:
            key = (about["weights"], about["dtype"], about["split"], cell.name, cell.questions, cell.digest)
            title = f"{about['model']}, {about['dtype']}, {about['split']} split, worlds of {cell.name}"
            section = found.setdefault(key, Section(title, cell, []))
            full = next((run for run in cell.runs if run.setting == FULL), None)
            for run in cell.runs:
                assert full is not None  # the first engine measures it
                known = [
                    line for line in section.lines if (line.run.setting, line.run.ratio) == (run.setting, run.ratio)
                ]
                if any(np.array_equal(line.run.correct, run.correct) for line in known):
                    continue  # full prefill and plain reuse are in every file
                section.lines.append(Line(run, full, f"{run.setting} (again)" if known else run.setting))
    if not any(section.lines for section in found.values()):
        raise ValueError("the files hold no answers: the measurement was interrupted")
    return list(found.values())


def check_baseline(over: str | None, runs: Sequence[tuple[str, float | None]]) -> None:
    """Raise ValueError unless `over`, if it is given, names a setting of `runs`, or one of them by "SETTING@RATIO"."""
    if over is not None and not any(over in (setting, _label(setting, ratio)) for setting, ratio in runs):
        known = ", ".join(dict.fromkeys(_label(setting, ratio) for setting, ratio in runs))
        raise ValueError(f"--over {over!r} is not measured: use one of {known}")


def _find(section: Section, over: str) -> Answered | None:
    runs = (line.run for line in section.lines)
    return next((run for run in runs if over in (run.setting, _label(run.setting, run.ratio))), None)


def _label(setting: str, ratio: float | None) -> str:
    return setting if ratio is None else f"{setting}@{ratio:g}"
