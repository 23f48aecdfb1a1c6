"""The rows as a picture: score against cost. Needs matplotlib, which `pip install -e ".[bench]"` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.quality.report import NAMES
from vllm_blend.pipeline.quality.rows import ALL, FULL


def load_pyplot() -> Any:
    """matplotlib's pyplot, drawing to files. ImportError says how to get it, or how to do without."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "the picture needs matplotlib, which is not installed: pip install matplotlib (it is part of the extra "
            "`bench`), or ask for no picture"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per data set: each setting's score over the token-layers it took, with intervals, below 60% of full
    prefill's; the levels of full prefill and plain reuse as lines."""
    pyplot = load_pyplot()
    rows = [row for row in rows if row["kind"] == ALL]
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    figure, panels = pyplot.subplots(1, len(names), figsize=(6.5 * len(names), 5.5), squeeze=False)
    for name, panel in zip(names, panels[0], strict=True):
        _draw_panel(panel, name, [row for row in rows if row["dataset"] == name])
    panels[0][-1].legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_panel(panel: Any, name: str, rows: Sequence[dict[str, Any]]) -> None:
    metric = rows[0]["metric"]
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["setting"] == FULL:
            panel.axhline(100 * row[metric], color="black", linewidth=1, label=FULL)
        elif row["token_layers"] < 0.6:
            curves.setdefault(row["setting"], []).append(row)
    for number, (setting, points) in enumerate(curves.items()):
        x, y = ([100 * point[column] for point in points] for column in ("token_layers", metric))
        below, above = ([abs(100 * (p[f"{metric}{end}"] - p[metric])) for p in points] for end in ("_low", "_high"))
        marker = "osv^D*Px"[number % 8]
        panel.errorbar(x, y, (below, above), label=setting, marker=marker, markersize=4, linewidth=1.2, elinewidth=0.4)
    panel.set_title(f"{name}, {rows[0]['samples']} questions")
    panel.set_xlabel("token-layers computed, % of full prefill")
    panel.set_ylabel(f"{NAMES[metric]}, %")
    panel.grid(alpha=0.3)
