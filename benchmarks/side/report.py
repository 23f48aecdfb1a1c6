"""Make the table of a side-by-side run from its JSON: medians, ratios with an interval, floors, and what is absent.

A ratio is the other side's median seconds of a unit of work over ours: above 1, ours is faster. Its interval of 95%
comes from a bootstrap in two steps, first over a side's turns (a process each), then over the samples in them, so that
it shows what a new process changes as well. `drift` is the last turn's median over the first's: ours, then the other's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.side.rows import UNITS
from benchmarks.side.turns import OURS

DRAWS = 2000
Samples = Sequence[Sequence[float]]  # by turn


def render(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    about, peers = report["about"], report["peers"]
    lines = [f"# Side by side on {about['hardware']}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in about.items()]
    lines += [
        f"| {side} | {', '.join(f'{k} {v}' for k, v in found.items())} |" for side, found in versions(report).items()
    ]
    lines += ["", "Sides that were to run beside ours:", ""]
    lines += [f"- {name}: {said}" for name, said in peers.items()] + ["", *table(report), ""]
    if missing := absences(report):
        lines += ["Absent:", "", *missing, ""]
    lines += ["Options of `LLM`, by group:", ""]
    for name, group in report["groups"].items():
        more = f"; ours also {options(group['ours'])}" if group["ours"] else ""
        lines.append(f"- {name} ({group['model']}): {options(group['options'])}{more}")
    return "\n".join(lines) + "\n"


def table(report: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    sides = [name for name, said in report["peers"].items() if not said.startswith("absent")]
    head = [
        "work",
        "unit",
        "ours",
        *(cell for side in sides for cell in (side, f"ours against {side}", "drift")),
        "floor",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in report["rows"]:
        own = samples(report, OURS, row["name"])
        cells = [row["label"], row["unit"], shown(row["unit"], own)]
        for side in sides:
            other = samples(report, side, row["baseline"] or row["name"])
            marked = " (its baseline)" if row["baseline"] and other else ""
            cells += [shown(row["unit"], other) + marked, compared(own, other), drift(own, other)]
        low = row["floor"]
        cells.append("absent" if low is None else figure(row["unit"], low))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def samples(report: dict[str, Any], side: str, row: str) -> list[list[float]]:
    """Return what a side has measured of a row, a list for each of its turns."""
    return [turn["samples"][row] for turn in report["turns"] if turn["side"] == side and row in turn["samples"]]


def shown(unit: str, found: Samples) -> str:
    return figure(unit, statistics.median(flat(found))) if found else "absent"


def figure(unit: str, seconds: float) -> str:
    """Return seconds of a unit of work in the row's unit."""
    factor = UNITS[unit]
    value = 1 / seconds if factor is None else factor * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def compared(own: Samples, other: Samples) -> str:
    """Return how many times as fast as the other side ours is, with its interval where there are samples for one."""
    if not own or not other:
        return "absent"
    middle = statistics.median(flat(other)) / statistics.median(flat(own))
    if min(len(flat(own)), len(flat(other))) < 3:
        return f"{middle:.2f}x (too few samples for an interval)"
    low, high = interval(own, other)
    return f"{middle:.2f}x ({low:.2f} to {high:.2f})"


def interval(own: Samples, other: Samples, seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap interval of 95% of the ratio of medians, other over own."""
    rng = random.Random(seed)

    def median(found: Samples) -> float:
        turns = rng.choices(found, k=len(found))
        return statistics.median(value for turn in turns for value in rng.choices(turn, k=len(turn)))

    ratios = sorted(median(other) / median(own) for _ in range(DRAWS))
    return ratios[int(0.025 * DRAWS)], ratios[int(0.975 * DRAWS) - 1]


def drift(own: Samples, other: Samples) -> str:
    """Return each side's last turn over its first; nothing for a side with one turn."""
    parts = [
        f"{statistics.median(found[-1]) / statistics.median(found[0]):.2f}" for found in (own, other) if len(found) > 1
    ]
    return " / ".join(parts)


def absences(report: dict[str, Any]) -> list[str]:
    """Return a line for every row that a side does not have, with the reason."""
    lines = []
    running = [OURS, *(name for name, said in report["peers"].items() if not said.startswith("absent"))]
    for row in report["rows"]:
        for side in running:
            if side != OURS and row["baseline"] is not None:
                continue  # what it is compared with has a row of its own
            reason = row["absent"].get(side)
            failed = [
                turn["failed"][row["name"]]
                for turn in report["turns"]
                if turn["side"] == side and row["name"] in turn["failed"]
            ]
            if reason or failed:
                some = "in one of its turns: " if failed and samples(report, side, row["name"]) else ""
                lines.append(f"- {row['label']}, {side}: {some}{reason or failed[0]}")
        if row["floor"] is None and row["floor_absent"] not in lines:
            lines.append(row["floor_absent"])
    return list(dict.fromkeys(lines))


def versions(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the versions that each side has run with."""
    found: dict[str, dict[str, str]] = {}
    for turn in report["turns"]:
        for start in turn["starts"]:
            found.setdefault(turn["side"], {}).update({k: v for k, v in start["versions"].items() if v})
    return found


def options(values: dict[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in values.items())


def flat(found: Samples) -> list[float]:
    return [value for turn in found for value in turn]
