"""Tables of budgets: what stands in which column, and which oracle is the highest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.quality.answers import answered, measured
from vllm_blend.quality import held_out
from vllm_blend.quality.held_out_budgets import render_budgets
from vllm_blend.quality.held_out_file import HeldOut, write_held_out

RULE = "relevant_passages"


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a document, as cells."""
    found: list[list[list[str]]] = []
    lines = text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def ours() -> HeldOut:
    return measured(
        answered(RULE, 0.05, "1000", 0.06),
        answered(RULE, 0.1, "1110", 0.11),
        answered("oracle: gold", 0.05, "1100", 0.05),
        answered("oracle: gold, others damped", 0.05, "0011", 0.04),  # as many, for less
        answered("oracle: gold", 0.1, "1111", 0.1),
        answered("oracle: gold, others damped", 0.1, "0111", 0.04),
        answered("only chosen pages", 0.05, "1111", 0.2),  # no oracle
    )


def test_settings_stand_at_their_budgets() -> None:
    _, table = tables(render_budgets([ours()]))
    assert table[0] == ["setting", "5%", "10%"]
    rows = {row[0]: row[1:] for row in table[2:]}
    assert list(rows) == [
        "full prefill",
        "plain reuse",
        RULE,
        "oracle: gold",
        "oracle: gold, others damped",
        "only chosen pages",
        "the highest oracle",
    ]
    assert rows[RULE][1].startswith("75.0 (") and rows[RULE][1].endswith("); 11.0")
    assert rows["full prefill"][0] == rows["full prefill"][1] and rows["full prefill"][0].startswith("75.0 (")
    assert rows["only chosen pages"] == ["100.0 (100.0 to 100.0); 20.0", ""]
    assert rows["the highest oracle"] == ["50.0: gold, others damped", "100.0: gold"]


def test_the_summary_has_a_line_for_each_model_and_cell() -> None:
    first = ours()
    other = replace(first.cells[0], name="8 families", passages=(35, 46), digest="e")
    wanting = HeldOut(first.about, (replace(other, runs=other.runs[:4]),))  # the rule alone
    summary = tables(render_budgets([first, wanting]))[0]
    assert summary[0][1:4] == ["passages", "full prefill", "plain reuse"]
    assert summary[0][4:] == [
        f"{RULE}, 5%",
        f"{RULE}, 10%",
        "the highest oracle, 5%",
        "the highest oracle, 10%",
    ]
    assert [row[1:] for row in summary[2:]] == [
        ["8 to 12", "75.0", "25.0", "25.0", "75.0", "50.0", "100.0"],
        ["35 to 46", "75.0", "25.0", "25.0", "75.0", "", ""],
    ]


def test_files_without_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="no setting at a ratio between 0 and 1"):
        render_budgets([measured()])


def test_the_command_prints_what_files_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_held_out(tmp_path / "a.json", ours())
    held_out.main(["--report", str(tmp_path / "a.json"), "--by-budget"])
    said = capsys.readouterr().out
    assert (
        said == render_budgets([ours()]) + "\n" and "# What a budget can reach" in said and "    python -m x\n" in said
    )
