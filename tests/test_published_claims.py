"""Sentences and rows of the pages that say what was measured, written again from the committed answers.

The other tests of published numbers look for a figure anywhere in what a page links; here each figure has its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

from tests.checkout import ROOT
from vllm_blend.quality.held_out_file import read_held_out
from vllm_blend.quality.held_out_report import find_sections, make_rows
from vllm_blend.quality.sweep_file import read_sweep

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "benchmarks" / "results"
RULE, LOOK, FULL, REUSE = "relevant_passages", "question_attention", "full prefill", "plain reuse"
UNDAMPED, DEVIATION, GOLD = "relevant_passages(damping=1)", "value_deviation", "oracle: gold passages"
DAMPED, FREE, CHOSEN = f"{GOLD}, others damped", f"{RULE}, order free", "only chosen pages"
PLAIN_2, PLAIN_4, PLAIN_8 = (f"{number} families, plain" for number in (2, 4, 8))
WILD = "4 families, wild"
Row = dict[str, Any]
Where = tuple[str, str]  # a file of held-out answers without its end, and a cell's name
LONG, LONG_40 = ("held_out_test_long", PLAIN_4), ("held_out_test_long", PLAIN_8)
THIRD, THIRD_40 = ("held_out_test_third", PLAIN_4), ("held_out_test_third", PLAIN_8)
CONTINUED, CONTINUED_40 = ("held_out_test_continued", PLAIN_4), ("held_out_test_continued", PLAIN_8)
LONG_WILD = ("held_out_test_long_wild", WILD)
REUSING, REUSING_40 = ("held_out_test_long_reuse", PLAIN_4), ("held_out_test_long_reuse", PLAIN_8)
CEILINGS = [("ceilings_long", cell) for cell in (PLAIN_2, PLAIN_4, PLAIN_8)]


@cache
def held_out(where: Where) -> dict[tuple[str, float | None], Row]:
    """Return the rows of a cell by setting and ratio; differences are to question attention at 13%, if it is there."""
    name, cell = where
    [section] = [each for each in find_sections([read_held_out(RESULTS / f"{name}.json")]) if each.cell.name == cell]
    looks = (line.run for line in section.lines if (line.run.setting, line.run.ratio) == (LOOK, 0.13))
    rows = make_rows(section, next(looks, None), seed=0)
    return {(row["setting"], row["ratio"]): row for row in rows}


def row(where: Where, setting: str, ratio: float | None = None) -> Row:
    return held_out(where)[setting, 0.0 if setting == REUSE else ratio]


@cache
def sweep(name: str) -> dict[tuple[str, str, float | None], Row]:
    """Return the rows over all questions of a sweep by data set, setting and ratio."""
    rows = [each for each in read_sweep(RESULTS / f"{name}.json")[2] if each["kind"] == "all"]
    return {(each["dataset"], each["setting"], each["ratio"]): each for each in rows}


def percent(share: float) -> str:
    return f"{100 * share + 0.0:.1f}"


def exact(found: Row) -> str:
    return percent(found["exact_match"])


def cost(found: Row) -> str:
    return percent(found["token_layers"])


def kept(found: Row) -> str:
    return percent(found["kept"])


def whole(share: float) -> str:
    """Return an interval's end as the README has it: 100 without a digit after the point."""
    return "100" if share == 1 else percent(share)


def between(found: Row, name: str) -> str:
    return f"{whole(found[name + '_low'])} to {whole(found[name + '_high'])}"


def interval(found: Row) -> str:
    return f"{exact(found)} ({between(found, 'exact_match')})"


def readme() -> list[str]:
    columns = (LONG, LONG_40, THIRD)
    methods = [
        (FULL, None, "full prefill"),
        (REUSE, None, "plain reuse"),
        (DEVIATION, 0.08, "`value_deviation` (CacheBlend), 8%"),
        (LOOK, 0.13, "`question_attention`, 13%"),
        (RULE, 0.07, "`relevant_passages`, 7%"),
        (RULE, 0.155, "`relevant_passages`, 15.5%"),
    ]
    lines = []
    for setting, ratio, label in methods:
        found = [row(where, setting, ratio) for where in columns]
        work = ["" if setting == FULL else f" [{100 * each['token_layers']:.0f}]" for each in found]
        cells = [interval(each) + end for each, end in zip(found, work, strict=True)]
        lines.append(f"| {' | '.join([label, *cells])} |")
    wild, reusing = row(LONG_WILD, RULE, 0.155), [row(where, REUSE) for where in (REUSING, REUSING_40)]
    assert kept(reusing[0]) == kept(reusing[1])
    return [
        *lines,
        f"keeps {kept(wild)}% of full prefill's score on the first model ({between(wild, 'kept')}), "
        f"for {100 * wild['token_layers']:.0f}% of the work",
        f"keeps {kept(reusing[0])}% of its score by plain reuse ({between(reusing[0], 'kept')} with 20 passages, "
        f"{between(reusing[1], 'kept')} with 40), for {100 * reusing[0]['token_layers']:.0f} and "
        f"{100 * reusing[1]['token_layers']:.0f}% of the work",
    ]


def selection_rows() -> list[str]:
    models = [
        (LONG, "long, plain, 16 to 23"),
        (LONG_40, "long, plain, 35 to 46"),
        (THIRD, "third, plain, 16 to 23"),
        (THIRD_40, "third, plain, 35 to 46"),
        (CONTINUED, "continued, plain, 16 to 23"),
        (CONTINUED_40, "continued, plain, 35 to 46"),
        (LONG_WILD, "long, wild, 15 to 24"),
    ]
    lines = []
    for where, label in models:
        reuse, look, small = row(where, REUSE), row(where, LOOK, 0.13), row(where, RULE, 0.07)
        large, bold = row(where, RULE, 0.155), "" if where == LONG_WILD else "**"
        cells = [label, exact(row(where, FULL)), *(f"{exact(each)} ({cost(each)})" for each in (reuse, look, small))]
        cells.append(f"{bold}{exact(large)}{bold} ({cost(large)})")
        oracle = None if where == LONG_WILD else row(where, DAMPED, 0.13)
        cells.append("" if oracle is None else f"{exact(oracle)} ({cost(oracle)})")
        lines.append("| " + " | ".join(cells).rstrip() + " |")
    settings = [
        (FULL, "full prefill"),
        (REUSE, "plain reuse"),
        (RULE, "`relevant_passages`"),
        (FREE, "`relevant_passages`, order free"),
        ("auto, order free", "`auto`, order free"),
        (CHOSEN, "only chosen pages"),
        (GOLD, "oracle: gold passages"),
        (DAMPED, "oracle: gold passages, others damped"),
        ("oracle: true attention", "oracle: true attention"),
    ]
    for setting, label in settings:
        found = [
            row(where, setting, None if setting == FULL else ratio) for where in CEILINGS for ratio in (0.05, 0.15)
        ]
        cells = [exact(each) if setting == FULL else f"{exact(each)} ({cost(each)})" for each in found]
        lines.append(f"| {' | '.join([label, *cells])} |")
    return lines


def unnamed_pages() -> list[str]:
    """Return the rows about prompts that do not name pages, and those of prompts that do."""
    rules = [(FULL, "full prefill"), (REUSE, "plain reuse"), (LOOK, f"`{LOOK}`"), (RULE, f"`{RULE}`")]
    lines = []
    for named in (False, True):
        for setting, label in rules[2 * named :]:
            ratio = {FULL: None, REUSE: 0.0}.get(setting, 0.155)
            where = "held_out_development_named" if named else "held_out_development_unnamed"
            cells = [f"{families} families, plain{'' if named else ', without pages'}" for families in (2, 4)]
            found = [exact(row((where, cell), setting, ratio)) for cell in cells]
            name = f"{setting}, after page" if named else setting
            asked = [sweep("quality_all")[each, name, ratio and 0.15] for each in ("musique_s", "wikimqa_s")]
            found += [percent(each["f1"]) for each in asked]
            lines.append(f"| {' | '.join([label + ', pages named' * named, *found])} |")
    return lines


def selection() -> list[str]:
    large = {where: row(where, RULE, 0.155) for where in (LONG, LONG_40, CONTINUED, CONTINUED_40, THIRD, THIRD_40)}
    small = [row(where, RULE, 0.07) for where in large]
    wild, wild_small = row(LONG_WILD, RULE, 0.155), row(LONG_WILD, RULE, 0.07)
    short = (LONG, THIRD, CONTINUED)
    of_oracle = [percent(large[each]["exact_match"] / row(each, DAMPED, 0.13)["exact_match"]) for each in short]
    undamped = [f"{exact(row(each, UNDAMPED, 0.155))} in place of {exact(large[each])}" for each in short]
    golds, deviations = (
        [exact(row(each, setting, ratio)) for each in short] for setting, ratio in ((GOLD, 0.13), (DEVIATION, 0.08))
    )
    over = [row(where, RULE, ratio) for where in (*large, LONG_WILD) for ratio in (0.07, 0.155)]
    cheapest = [(row(where, RULE, 0.155), row(where, LOOK, 0.13)) for where in (*large, LONG_WILD)]
    assert all(rule["token_layers"] < look["token_layers"] for rule, look in cheapest)
    beside = [row(LONG, RULE, ratio)["token_layers"] - row(LONG, REUSE)["token_layers"] for ratio in (0.07, 0.155)]
    reusing, reusing_40 = row(REUSING, REUSE), row(REUSING_40, REUSE)
    ten, twenty, forty = CEILINGS
    ratios = [
        row(where, CHOSEN, ratio)["token_layers"] / row(where, RULE, ratio)["token_layers"]
        for where in CEILINGS
        for ratio in (0.05, 0.15)
        if (where, ratio) not in ((ten, 0.05), (forty, 0.15))
    ]
    fewer = row(forty, CHOSEN, 0.15)["token_layers"] / row(forty, RULE, 0.15)["token_layers"]
    wide = [large[each] for each in (LONG, LONG_40, CONTINUED)]
    first, second, third = (f"{kept(each)}% ({between(each, 'kept')})" for each in wide)
    return [
        *selection_rows(),
        *unnamed_pages(),
        f"{first} of *long* with 20 passages and {second} with 40, {third} and {kept(large[CONTINUED_40])}% of "
        f"*continued*, {kept(large[THIRD])} and {kept(large[THIRD_40])}% of *third*; at 7%: "
        f"{', '.join(map(kept, small[:-1]))} and {kept(small[-1])}%.",
        f"{kept(wild)}% ({between(wild, 'kept')}) at {cost(wild)}% and {kept(wild_small)}% at {cost(wild_small)}%.",
        f"It answers {100 * min(each['over'] for each in over):.0f} to {100 * max(each['over'] for each in over):.0f} "
        "points more than question attention at 13% recomputed",
        f"(the lowest end of an interval is {percent(min(each['over_low'] for each in over))})",
        f"the rule has {of_oracle[0]}% on *long*, {of_oracle[1]}% on *third* and {of_oracle[2]}% on *continued*",
        f"damping answer {golds[0]}, {golds[1]} and {golds[2]}: less than the rule.",
        f"answers {deviations[0]}, {deviations[1]} and {deviations[2]} with 20 passages",
        f"({percent(row(THIRD, FULL)['kinds']['2hop'])}% of two hops in full prefill)",
        f"{percent(large[LONG]['kinds']['2hop'])}% on *long* at 14%, and {percent(small[0]['kinds']['2hop'])}% at 7%.",
        f"full prefill answers {exact(row(REUSING, FULL))} and {exact(row(REUSING_40, FULL))}%, and **plain reuse "
        f"keeps {kept(reusing)}%** ({between(reusing, 'kept')}) of that with 20 passages for {cost(reusing)}% of the "
        f"token-layers, and {kept(reusing_40)}% ({between(reusing_40, 'kept')}) with 40 for {cost(reusing_40)}.",
        f"at 2% keeps {kept(row(REUSING, RULE, 0.02))} and {kept(row(REUSING_40, RULE, 0.02))}:",
        f"7% costs {percent(beside[0])}% of full prefill's token-layers beside the question, and 15.5% costs "
        f"{percent(beside[1])}.",
        f"the rule answers {undamped[0]} (*long*, 20 passages), {undamped[1]} (*third*) and {undamped[2]} "
        "(*continued*).",
        f"({exact(row(ten, FREE, 0.05))} and {exact(row(ten, RULE, 0.2))}; "
        f"{exact(row(twenty, FREE, 0.05))} and {exact(row(twenty, RULE, 0.2))}; the intervals overlap)",
        f"for {min(ratios):.1f} to {max(ratios):.1f} times the token-layers ({fewer:.1f} times with 40 passages at "
        "15%)",
    ]


def f1(name: str, dataset: str, setting: str, ratio: float | None) -> str:
    return percent(sweep(name)[dataset, setting, ratio]["f1"])


def right_in_full(name: str) -> list[int]:
    """Return how many questions of musique and wikimqa full prefill answers in a sweep over all of them."""
    found = [sweep(name)[each, FULL, None] for each in ("musique_s", "wikimqa_s")]
    assert [each["samples"] for each in found] == [150, 200]
    return [round(each["samples"] * each["exact_match"]) for each in found]


def quickstart() -> list[str]:
    methods = [
        (FULL, None, "full prefill"),
        (REUSE, 0.0, "plain reuse"),
        (LOOK, 0.08, "blend, question attention, 8%"),
        (LOOK, 0.15, "blend, question attention, 15%"),
        ("late_attention+mean_shift", 0.08, "blend, late attention and mean shift (`auto`), 8%"),
        (DEVIATION, 0.15, "blend, value deviation, 15% (CacheBlend's rule)"),
    ]
    data, lines = ("musique_s", "wikimqa_s"), []
    for setting, ratio, label in methods:
        scores = [f1(name, each, setting, ratio) for name in ("quality_reuse_model", "quality") for each in data]
        computed = [cost(sweep("quality")[each, setting, ratio]) for each in data]
        lines.append(f"| {' | '.join([label, *scores, '100' if setting == FULL else ' / '.join(computed)])} |")
    return lines


def finetune() -> list[str]:
    methods = [
        (FULL, None, "full prefill"),
        (REUSE, 0.0, "plain reuse"),
        (LOOK, 0.015, "question attention 1.5%"),
        (LOOK, 0.08, "question attention 8%"),
        (LOOK, 0.15, "question attention 15%"),
        (DEVIATION, 0.08, "value deviation 8%"),
        (DEVIATION, 0.15, "value deviation 15%"),
    ]
    data, lines = ("musique_s", "wikimqa_s"), []
    for setting, ratio, label in methods:
        found = [sweep("quality_reuse_model_all")[each, setting, ratio] for each in data]
        cells = [text for each in found for text in (cost(each), percent(each["f1"]), kept(each))]
        lines.append(f"| {' | '.join([label, *cells])} |")
    shifted = f"{LOOK}+mean_shift"
    compared = [
        (FULL, None, "full prefill"),
        (REUSE, 0.0, "plain reuse"),
        *((LOOK, ratio, f"question attention {100 * ratio:.0f}%") for ratio in (0.02, 0.08, 0.15)),
        *((shifted, ratio, f"+ mean_shift {100 * ratio:.0f}%") for ratio in (0.02, 0.08, 0.15)),
        ("late_attention+mean_shift", 0.08, "late attention + mean_shift 8%"),
        *((DEVIATION, ratio, f"value deviation {100 * ratio:.0f}%") for ratio in (0.08, 0.15)),
    ]
    for setting, ratio, label in compared:
        pairs = [[f1(name, each, setting, ratio) for name in ("quality", "quality_reuse_model")] for each in data]
        lines.append(f"| {' | '.join([label, *map(' / '.join, pairs)])} |")
    musique, wikimqa = (sweep("quality_reuse_model_all")[each, REUSE, 0.0] for each in data)
    right, plain = (right_in_full(name) for name in ("quality_reuse_model_all", "quality_all"))
    after_page = [f1("quality_reuse_model", each, f"{LOOK}, after page", 0.0) for each in data]
    assert after_page == [f1("quality_reuse_model", each, REUSE, 0.0) for each in data]
    return [
        *lines,
        f"{right[0]} of 150 answers right on musique and {right[1]} of 200 on wikimqa, where the plain model has "
        f"{plain[0]} and {plain[1]}",
        f"plain reuse has {after_page[0]} on musique and {after_page[1]} on wikimqa in both cases",
        f"{kept(musique)}% on musique (F1 {percent(musique['f1'])}, from {between(musique, 'f1')}, of "
        f"{f1('quality_reuse_model_all', 'musique_s', FULL, None)}) for {cost(musique)}%, all of it on wikimqa for "
        f"{cost(wikimqa)}% ",
    ]


def own_model() -> list[str]:
    before, after = (f1(name, "musique_s", REUSE, 0.0) for name in ("quality_all", "quality_reuse_model_all"))
    return [
        f"F1 by plain reuse on musique from [{before}](../benchmarks/results/quality_all.md) to "
        f"[{after}](../benchmarks/results/quality_reuse_model_all.md), "
        f"{100 * sweep('quality_reuse_model_all')['musique_s', REUSE, 0.0]['kept']:.0f}% of full prefill's",
    ]


def reuse_model() -> list[str]:
    ways, data = ((FULL, None), (REUSE, 0.0)), ("musique_s", "wikimqa_s")
    pairs = [
        [" / ".join(f1(name, each, setting, ratio) for setting, ratio in ways) for each in data]
        for name in ("quality_reuse_model_all", "quality_all")
    ]
    return [
        f"{pairs[0][0]} on the 150 questions of `musique_s.json`, {pairs[0][1]} on the 200 of `wikimqa_s.json`",
        f"{pairs[1][0]} on the first and {pairs[1][1]} on the second",
    ]


CLAIMS = {
    "README.md": readme,
    "docs/selection.md": selection,
    "docs/quickstart.md": quickstart,
    "docs/finetune.md": finetune,
    "docs/pipeline.md": own_model,
    "inputs/demo-model-reuse/README.md": reuse_model,
}


def missing(claims: Iterable[str], text: str) -> list[str]:
    """Return the claims that a page's text does not have, whatever its spaces and line breaks."""
    plain = " ".join(text.split())
    return [claim for claim in claims if " ".join(claim.split()) not in plain]


@pytest.mark.parametrize("page", CLAIMS)
def test_pages_say_what_was_measured(page: str) -> None:
    assert missing(CLAIMS[page](), (ROOT / page).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "94.6 (92.6 to 96.4) [14]", "94.6 (92.6 to 96.4) [13]"),
        ("README.md", "84.7% of full prefill's score", "85.7% of full prefill's score"),
        ("docs/selection.md", "at 15.6% and 76.0%", "at 15.6% and 76.1%"),
        ("docs/selection.md", "for 2.1 to 3.2 times", "for 2.1 to 3.3 times"),
        ("docs/quickstart.md", "15.1 / 13.9", "15.1 / 13.8"),
    ],
)
def test_a_changed_figure_is_found(page: str, old: str, new: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert old in text and len(missing(CLAIMS[page](), text.replace(old, new))) == 1
