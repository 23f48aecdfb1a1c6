"""Sentences and rows of the pages that say what was measured, written again from the committed numbers.

The other tests of published numbers look for a figure anywhere in what a page links; here each figure has its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from tests.checkout import ROOT

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "benchmarks" / "results"
LOOK, FULL, REUSE, DEVIATION = "question_attention", "full prefill", "none", "value_deviation"
PLAIN, TRAINED, LONG = "synthetic_demo_model", "synthetic_demo_model_reuse", "synthetic_long_reuse"
DATA = ("musique_s", "wikimqa_s")
Row = dict[str, Any]


@cache
def table(name: str) -> dict[tuple[str, str, float | None], Row]:
    """Return the rows of a file that benchmarks.real_text has written, by data set, rule and ratio."""
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return {(each["dataset"], each["rule"] or each["setting"], each["ratio"]): each for each in rows}


def row(name: str, dataset: str, rule: str, ratio: float | None = None) -> Row:
    return table(name)[dataset, rule, 0.0 if rule == REUSE else ratio]


def percent(share: float) -> str:
    return f"{100 * share + 0.0:.1f}"


def f1(name: str, dataset: str, rule: str, ratio: float | None = None) -> str:
    return percent(row(name, dataset, rule, ratio)["f1"])


def kept(name: str, dataset: str, rule: str, ratio: float | None = None) -> str:
    return percent(row(name, dataset, rule, ratio)["f1"] / row(name, dataset, FULL)["f1"])


def agreed(name: str, dataset: str, rule: str, ratio: float | None = None) -> str:
    return f"{100 * row(name, dataset, rule, ratio)['agreement']:.0f}"


def right(name: str, dataset: str) -> int:
    """Return how many questions full prefill answers."""
    found = row(name, dataset, FULL)
    return round(float(found["questions"] * found["exact_match"]))


def quickstart() -> list[str]:
    methods = [
        (FULL, None, "full prefill"),
        (REUSE, 0.0, "plain reuse"),
        (LOOK, 0.08, "blend, question attention, 8%"),
        (LOOK, 0.15, "blend, question attention, 15% (the default rule)"),
        (DEVIATION, 0.15, "blend, value deviation, 15% (CacheBlend's rule)"),
    ]
    lines = []
    for rule, ratio, label in methods:
        asked = [(name, each, rule, ratio) for name in (TRAINED, PLAIN) for each in DATA]
        scores = [f"{f1(*each)} / {agreed(*each)}" for each in asked]
        work = " / ".join(percent(row(PLAIN, each, rule, ratio)["work"]) for each in DATA)
        lines.append(f"| {' | '.join([label, *scores, '100' if rule == FULL else work])} |")
    return lines


def finetune() -> list[str]:
    methods = [
        (FULL, None, "full prefill"),
        (REUSE, 0.0, "plain reuse"),
        (LOOK, 0.02, "question attention 2%"),
        (LOOK, 0.08, "question attention 8%"),
        (LOOK, 0.15, "question attention 15%"),
        (DEVIATION, 0.08, "value deviation 8%"),
        (DEVIATION, 0.15, "value deviation 15%"),
    ]
    lines = []
    for rule, ratio, label in methods:
        cells = [
            text
            for each in DATA
            for text in (
                percent(row(TRAINED, each, rule, ratio)["work"]),
                f1(TRAINED, each, rule, ratio),
                kept(TRAINED, each, rule, ratio),
                agreed(TRAINED, each, rule, ratio),
            )
        ]
        lines.append(f"| {' | '.join([label, *cells])} |")
    unshifted = f"{LOOK}(mean_shift=0)"
    compared = [
        (FULL, None, "full prefill"),
        (REUSE, 0.0, "plain reuse"),
        *(
            (unshifted, ratio, f"question attention without mean shift {100 * ratio:.0f}%")
            for ratio in (0.02, 0.08, 0.15)
        ),
        *((LOOK, ratio, f"question attention {100 * ratio:.0f}%") for ratio in (0.02, 0.08, 0.15)),
        *((DEVIATION, ratio, f"value deviation {100 * ratio:.0f}%") for ratio in (0.08, 0.15)),
    ]
    for rule, ratio, label in compared:
        pairs = [[f1(name, each, rule, ratio) for name in (PLAIN, TRAINED)] for each in DATA]
        lines.append(f"| {' | '.join([label, *map(' / '.join, pairs)])} |")
    musique, wikimqa = (row(TRAINED, each, REUSE) for each in DATA)
    found = [right(name, each) for name in (TRAINED, PLAIN) for each in DATA]
    score, low, high, work = (percent(musique[name]) for name in ("f1", "f1_low", "f1_high", "work"))
    return [
        *lines,
        f"{kept(TRAINED, DATA[0], REUSE)}% on musique (F1 {score}, from {low} to {high}, of "
        f"{f1(TRAINED, DATA[0], FULL)}) for {work}%, all of it on wikimqa for {percent(wikimqa['work'])}%",
        f"{found[0]} of 150 answers right on musique and {found[1]} of 200 on wikimqa, where the plain model has "
        f"{found[2]} and {found[3]}",
    ]


def own_model() -> list[str]:
    before, after = (f1(name, DATA[0], REUSE) for name in (PLAIN, TRAINED))
    return [
        f"F1 by plain reuse on musique from [{before}](../benchmarks/results/{PLAIN}.md) to "
        f"[{after}](../benchmarks/results/{TRAINED}.md), {float(kept(TRAINED, DATA[0], REUSE)):.0f}% of full prefill's",
    ]


def reuse_model() -> list[str]:
    pairs = [[" / ".join(f1(name, each, rule) for rule in (FULL, REUSE)) for each in DATA] for name in (TRAINED, PLAIN)]
    return [
        f"{pairs[0][0]} on the 150 questions of `musique_s.json`, {pairs[0][1]} on the 200 of `wikimqa_s.json`",
        f"{pairs[1][0]} on the first and {pairs[1][1]} on the second",
    ]


def long_reuse_model() -> list[str]:
    found = [f"musique_development_{families}" for families in (4, 8)]
    scores = [f"{f1(LONG, each, REUSE)} of {f1(LONG, each, FULL)}" for each in found]
    same = " and ".join(agreed(LONG, each, REUSE) for each in found)
    return [f"{scores[0]} with 20 passages, {scores[1]} with 40", f"{same}% of the answers are the same"]


CLAIMS = {
    "docs/quickstart.md": quickstart,
    "docs/finetune.md": finetune,
    "docs/pipeline.md": own_model,
    "inputs/demo-model-reuse/README.md": reuse_model,
    "inputs/demo-model-long-reuse/README.md": long_reuse_model,
}


def missing(claims: Iterable[str], text: str) -> list[str]:
    """Return the claims that a page's text does not have, whatever its spaces and line breaks."""
    plain = " ".join(text.split())
    return [claim for claim in claims if " ".join(claim.split()) not in plain]


@pytest.mark.parametrize("page", CLAIMS)
def test_pages_say_what_was_measured(page: str) -> None:
    assert missing(CLAIMS[page](), (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", CLAIMS)
def test_a_changed_figure_is_found(page: str) -> None:
    claim = CLAIMS[page]()[-1]
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    first = next(index for index, character in enumerate(claim) if character.isdigit())
    changed = claim[:first] + str((int(claim[first]) + 1) % 10) + claim[first + 1 :]
    assert claim in text and claim in missing(CLAIMS[page](), text.replace(claim, changed))
