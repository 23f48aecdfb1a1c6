"""Draw the single measurements that benchmarks have recorded: a panel for each benchmark, a line for each row."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

LABEL = 90  # characters of a row's name


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a picture of the samples of a report of `benchmarks.run`; none if it has no samples."""
    from matplotlib.figure import Figure  # heavy, and only needed here

    panels = [(each["name"], each["samples"]) for each in report["runs"] if each["samples"]]
    if not panels:
        return
    heights = [len(rows) + 1.5 for _, rows in panels]
    figure = Figure(figsize=(13, 1 + 0.28 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, (name, rows) in zip(axes, panels, strict=True):
        for at, row in enumerate(rows):
            found = [1e3 * seconds for seconds in row["seconds"]]
            axis.plot(found, [at] * len(found), "o", color="tab:blue", alpha=0.4, markersize=4)
            axis.plot(statistics.median(found), at, "|", color="black", markersize=14)
        axis.set_yticks(range(len(rows)), [row["name"][:LABEL] for row in rows], fontsize=8)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(name, loc="left", fontsize=10)
    axes[-1].set_xlabel("ms of a unit of work (dots: samples, bar: their median)")
    about = report["about"]
    figure.suptitle(f"{about.get('gpu', about['processor'])}, {about['date']}, commit {about['commit'][:10]}")
    figure.savefig(path, dpi=120)
