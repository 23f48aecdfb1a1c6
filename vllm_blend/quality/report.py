"""Render the rows as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_blend.quality.rows import ALL, FULL
from vllm_blend.quality.settings import Setting

NAMES = {"exact_match": "exact match", "f1": "F1", "rouge_l": "Rouge-L"}
LEGEND = """\
Scores, shares and their 95% bootstrap intervals over the questions are in percent. `token-layers`: all that the prefill
put through the model, passes that only choose tokens and the question included, as a share of full prefill; computing
the stored chunks is apart. `kept`: the score's share of full prefill's. `recovered`: the share of what plain reuse
loses that is made good, (score - reuse) / (full - reuse). `over CacheBlend`: the score's difference to value_deviation
at the same ratio, over the same questions. `same answer`: word for word full prefill's own. `KL`: of the first answer
token's distribution, from full prefill, in nats, mean; none where that is not finite. Rows that compute the same as one
above are left out."""


def render(about: dict[str, Any], rows: Sequence[dict[str, Any]], settings: Sequence[Setting]) -> str:
    """Return the document. `about` says how the rows were measured; its entries are listed as they are."""
    lines = ["# Quality of blended answers", "", f"    {about['command']}", ""]
    lines += format_about({name: value for name, value in about.items() if name != "command"})
    lines += ["", LEGEND]
    for dataset in dict.fromkeys(row["dataset"] for row in rows):
        own = [row for row in rows if row["dataset"] == dataset]
        lines += ["", f"## {dataset}, {own[0]['samples']} questions", "", table(own)]
    lines += ["", "## Settings", "", "| setting | paper | prompt | engine |", "|---|---|---|---|"]
    for setting in settings:
        cells = (setting.name, setting.paper, _options(setting.prompt), _options(setting.engine))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_about(about: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry."""
    return [f"- {name.replace('_', ' ')}: {_format_value(value)}" for name, value in about.items()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of one data set: one line per setting and ratio, the kinds of question side by side."""
    metric = rows[0]["metric"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != ALL))
    by_kind = {(row["kind"], row["setting"], row["ratio"]): row for row in rows}
    heads = ["setting", "ratio", "token-layers", NAMES[metric], *(f"{NAMES[metric]} {kind}" for kind in kinds)]
    compared = any(row["over_cacheblend"] is not None for row in rows)
    heads += ["exact match", "kept", "recovered", *(["over CacheBlend"] if compared else []), "same answer", "KL"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        if row["kind"] != ALL or row["same_as"] is not None:
            continue
        ratio = "" if row["setting"] == FULL else f"{100 * row['ratio']:g}%"
        cells = [row["setting"], ratio, f"{100 * row['token_layers']:.1f}", interval_cell(row, metric)]
        cells += [percent(by_kind[kind, row["setting"], row["ratio"]][metric]) for kind in kinds]
        cells += [percent(row["exact_match"]), percent(row["kept"]), interval_cell(row, "recovered", 0)]
        cells += [interval_cell(row, "over_cacheblend")] if compared else []
        lines.append(f"| {' | '.join([*cells, percent(row['same_answer']), _format_number(row['kl'])])} |")
    return "\n".join(lines)


def interval_cell(row: Mapping[str, Any], name: str, digits: int = 1) -> str:
    """Return a share of a row in percent, with its interval; empty if there is none."""
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return ""
    text = percent(value, digits)
    return text if low is None else f"{text} ({percent(low, digits)} to {percent(high, digits)})"


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share in percent; empty for None."""
    return "" if value is None else f"{100 * value + 0.0:.{digits}f}"


def _format_number(number: float | None) -> str:
    return "" if number is None else f"{number:.2g}"


def _options(options: Any) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in options.items())


def _format_value(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, (list, tuple)) else str(value)
