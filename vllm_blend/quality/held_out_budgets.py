"""What each budget can reach: tables of held-out measurements with a column for each ratio, from their files alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from vllm_blend.quality.held_out_file import Answered, HeldOut
from vllm_blend.quality.held_out_report import Section, describe, find_sections
from vllm_blend.quality.intervals import Bootstrap
from vllm_blend.quality.report import percent
from vllm_blend.quality.rows import FULL
from vllm_blend.quality.settings import PLAIN_REUSE

RULE = "relevant_passages"
ORACLE = "oracle: "
HIGHEST = "the highest oracle"
LEGEND = f"""\
The worlds are synthetic. Exact match in percent, with its 95% interval over the worlds (a bootstrap), and after the
semicolon the cost: all that
the prefill put through the model, the question and passes that only choose tokens included, in percent of full
prefill's token-layers. Of an oracle, finding out what it names costs nothing here. A column is a budget: the share of
the context that may be computed again. Oracles that name less than the budget spend less. "Others damped": the keys of
passages of which nothing is computed are multiplied as by the rule. "{HIGHEST.capitalize()}" is chosen by these same
numbers, for each budget by itself, so it is a little too good. The `only` settings are no blends: their prompt has some
pages alone and is computed in full."""


def render_budgets(files: Sequence[HeldOut], seed: int = 0) -> str:
    """Return the document: a summary, then a table for each model and cell. Raises ValueError if the files hold no
    answers at any ratio between 0 and 1."""
    sections = [section for section in find_sections(files) if section.lines]
    ratios = sorted({ratio for section in sections for ratio in _ratios(section)})
    if not ratios:
        raise ValueError("the files have no setting at a ratio between 0 and 1: measure some to compare budgets")
    parts = ["# What a budget can reach", textwrap.fill(LEGEND, 120), _summary(sections, ratios)]
    for section in sections:
        parts += [f"## {section.title}: {section.counts}", _table(section, seed)]
    return "\n\n".join([*parts, *describe(files)]) + "\n"


def _summary(sections: Sequence[Section], ratios: Sequence[float]) -> str:
    """Return a table with a row for each section: the rule and the highest oracle at every ratio."""
    heads = ["worlds", "passages", FULL, PLAIN_REUSE.name]
    heads += [f"{RULE if is_rule else HIGHEST}, {_percent(ratio)}" for is_rule in (True, False) for ratio in ratios]
    lines = []
    for section in sections:
        fewest, most = section.cell.passages
        cells = [section.title, f"{fewest} to {most}", *(_score(_find(section, name)) for name in heads[2:4])]
        cells += [_score(_find(section, RULE, ratio)) for ratio in ratios]
        cells += [_score(_highest(section, ratio)) for ratio in ratios]
        lines.append(cells)
    return _markdown(heads, lines, 2)


def _table(section: Section, seed: int) -> str:
    ratios = _ratios(section)
    bootstrap = Bootstrap(len(section.cell.questions), seed, section.cell.worlds)

    def cell(run: Answered | None) -> str:
        if run is None:
            return ""
        estimate = bootstrap.score(run.correct.astype(float))
        low, high = percent(estimate.low), percent(estimate.high)
        return f"{percent(estimate.value)} ({low} to {high}); {percent(run.token_layers)}"

    lines = []
    for name in (FULL, PLAIN_REUSE.name):  # at no budget of these
        lines.append([name, *[cell(_find(section, name))] * len(ratios)])
    names = dict.fromkeys(line.name for line in section.lines if line.run.ratio in ratios)
    lines += [[name, *(cell(_find(section, name, ratio)) for ratio in ratios)] for name in names]
    highest = [_highest(section, ratio) for ratio in ratios]
    if any(highest):
        shown = ["" if run is None else f"{_score(run)}: {run.setting.removeprefix(ORACLE)}" for run in highest]
        lines.append([HIGHEST, *shown])
    return _markdown(["setting", *map(_percent, ratios)], lines, 1)


def _ratios(section: Section) -> list[float]:
    return sorted({line.run.ratio for line in section.lines if line.run.ratio is not None and 0 < line.run.ratio < 1})


def _find(section: Section, name: str, ratio: float | None = None) -> Answered | None:
    """Return the run of a line by its name, at a ratio (None: the first one)."""
    found = (line.run for line in section.lines if line.name == name and ratio in (None, line.run.ratio))
    return next(found, None)


def _highest(section: Section, ratio: float) -> Answered | None:
    """Return the oracle's run at a ratio that answers most, the cheapest of several."""
    runs = [line.run for line in section.lines if line.run.setting.startswith(ORACLE) and line.run.ratio == ratio]
    return max(runs, key=lambda run: (run.correct.sum(), -run.token_layers), default=None)


def _score(run: Answered | None) -> str:
    return "" if run is None else percent(float(run.correct.mean()))


def _percent(ratio: float) -> str:
    return f"{100 * ratio:g}%"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """Return a table whose first `left` columns are texts."""
    rule = "|---" * left + "|---:" * (len(heads) - left) + "|"
    return "\n".join([f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(cells)} |" for cells in lines)])
