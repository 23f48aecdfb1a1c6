"""Draw the rows: score against cost. Needs matplotlib, which `pip install -e ".[bench]"` installs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.timeline import load_pyplot
from vllm_blend.quality.report import NAMES
from vllm_blend.quality.rows import ALL, FULL
from vllm_blend.quality.settings import PLAIN_REUSE

WITHOUT = "give --no-picture"


def check_rows(rows: Any, where: Path) -> None:
    """Raise ValueError unless `rows`, read from the file `where`, are such as `make_rows` makes."""
    found = isinstance(rows, list) and bool(rows) and all(isinstance(row, dict) for row in rows)
    needed = {"dataset", "kind", "setting", "ratio", "samples", "metric", "token_layers"}
    if not found or any(not needed <= row.keys() or row["metric"] not in row for row in rows):
        raise ValueError(f"{where} holds no rows of a sweep: give a .json that benchmarks/quality.py has written")
    for name in {row["dataset"] for row in rows}:
        if not any((row["dataset"], row["kind"], row["setting"]) == (name, ALL, FULL) for row in rows):
            raise ValueError(f"{where} has no row {FULL!r} of the data set {name!r}: measure it again")


def draw(rows: Sequence[dict[str, Any]], path: Path, rules: Collection[str]) -> None:
    """Draw each setting's score over the token-layers it took, with intervals, below 60% of full prefill's. Each data
    set is a column; `rules` are drawn above, other settings below, with plain reuse in both."""
    pyplot = load_pyplot(WITHOUT)
    rows = [row for row in rows if row["kind"] == ALL]
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    settings = list(dict.fromkeys(row["setting"] for row in rows if _is_cheap(row) and row["setting"] != FULL))
    others = [name for name in settings if name != PLAIN_REUSE.name]
    parts = [[name for name in others if (name in rules) is wanted] for wanted in (True, False)]
    parts = [[PLAIN_REUSE.name, *part] for part in parts if part] or [[PLAIN_REUSE.name]]
    size = (5 * len(names) + 4, 4.5 * len(parts))
    figure, panels = pyplot.subplots(len(parts), len(names), figsize=size, squeeze=False, sharey="col")
    for part, line in zip(parts, panels, strict=True):
        for name, panel in zip(names, line, strict=True):
            _draw_panel(panel, name, [row for row in rows if row["dataset"] == name], part)
        line[-1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1.01, 1.02))
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _is_cheap(row: dict[str, Any]) -> bool:
    return bool(row["token_layers"] < 0.6)


def _draw_panel(panel: Any, name: str, rows: Sequence[dict[str, Any]], settings: Sequence[str]) -> None:
    metric = rows[0]["metric"]
    full = next(row for row in rows if row["setting"] == FULL)
    panel.axhline(100 * full[metric], color="black", linewidth=1, label=FULL)
    for number, setting in enumerate(settings):
        points = [row for row in rows if row["setting"] == setting and _is_cheap(row)]
        x, y = ([100 * point[column] for point in points] for column in ("token_layers", metric))
        below, above = ([abs(100 * (p[f"{metric}{end}"] - p[metric])) for p in points] for end in ("_low", "_high"))
        style = {"marker": "osv^D*Px<>"[number % 10], "color": f"C{number % 10}", "linestyle": "-"}
        if number >= 10:
            style["linestyle"] = "--" if number < 20 else ":"
        _, _, bars = panel.errorbar(x, y, (below, above), label=setting, markersize=4, linewidth=1.1, **style)
        for bar in bars:
            bar.set_alpha(0.15)
    panel.set_title(f"{name}, {full['samples']} questions", fontsize="medium")
    panel.set_xlabel("token-layers computed, % of full prefill")
    panel.set_ylabel(f"{NAMES[metric]}, %")
    panel.grid(alpha=0.3)
