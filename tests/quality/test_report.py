"""The report and the picture say what the rows say."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from vllm_blend.pipeline.timeline import load_pyplot
from vllm_blend.quality import picture
from vllm_blend.quality.catalogue import SETTINGS
from vllm_blend.quality.report import render, table


def row(setting: str, ratio: float | None, f1: float, **columns: Any) -> dict[str, Any]:
    values = {"dataset": "d", "kind": "all", "setting": setting, "ratio": ratio, "samples": 7, "metric": "f1"}
    values |= {"token_layers": 0.25, "encoding": 0.9, "same_as": None, "kl": 0.0123, "kl_low": 0.01, "kl_high": 0.02}
    for name, value in (("f1", f1), ("exact_match", 0.5), ("same_answer", 0.75), ("kept", f1 / 0.9)):
        values |= {name: value, f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}
    for name in ("recovered", "over_cacheblend"):
        values |= {name: None, f"{name}_low": None, f"{name}_high": None}
    return values | columns


ROWS = [
    row("full prefill", None, 0.9, token_layers=1.0),
    row("plain reuse", 0.0, 0.4, recovered=0.0, recovered_low=0.0, recovered_high=0.0),
    row("random", 0.0, 0.4, same_as="plain reuse"),
    row("random", 0.08, 0.6, recovered=0.4, over_cacheblend=-0.05, over_cacheblend_low=-0.1, over_cacheblend_high=0.0),
    row("random", 0.08, 0.2, kind="2hop"),
    row("full prefill", None, 0.8, kind="2hop"),
    row("plain reuse", 0.0, 0.1, kind="2hop"),
]


def test_the_table_has_a_line_for_each_thing_measured() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(ROWS).splitlines()]
    assert [line[:2] for line in lines[2:]] == [["full prefill", ""], ["plain reuse", "0%"], ["random", "8%"]]
    assert lines[0][2:5] == ["token-layers", "F1", "F1 2hop"]
    assert dict(zip(lines[0], lines[4], strict=True)) == {
        "setting": "random",
        "ratio": "8%",
        "token-layers": "25.0",
        "F1": "60.0 (50.0 to 70.0)",
        "F1 2hop": "20.0",
        "exact match": "50.0",
        "kept": "66.7",
        "recovered": "40",
        "over CacheBlend": "-5.0 (-10.0 to 0.0)",
        "same answer": "75.0",
        "KL": "0.012",
    }
    assert "over CacheBlend" not in table([r | {"over_cacheblend": None} for r in ROWS])


def test_the_report_says_how_it_was_measured() -> None:
    about = {"command": "python -m benchmarks.quality", "date": "2020-02-02", "left out as too long": [], "seed": 3}
    text = render(about, ROWS, SETTINGS)
    assert "    python -m benchmarks.quality\n" in text and "- date: 2020-02-02\n" in text and "- seed: 3\n" in text
    assert "- left out as too long: none\n" in text and "## d, 7 questions\n" in text
    assert all(f"| {setting.name} | {setting.paper} |" in text for setting in SETTINGS)
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    rows = [*ROWS, row("lever", 0.08, 0.7), row("full prefill", None, 0.9, dataset="e")]
    picture.draw(rows, tmp_path / "p.png", ["random"])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_rows_that_cannot_be_drawn_are_an_error(tmp_path: Path) -> None:
    picture.check_rows(ROWS, tmp_path / "q.json")
    lonely = [row for row in ROWS if row["setting"] != "full prefill"]
    for rows, message in (
        (None, "holds no rows"),
        ([], "holds no rows"),
        ([1], "holds no rows"),
        ({"a": 1}, "holds no rows"),
        ([{"kind": "all"}], "holds no rows"),
        ([ROWS[0] | {"metric": "bleu"}], "holds no rows"),
        (lonely, "has no row 'full prefill' of the data set 'd'"),
    ):
        with pytest.raises(ValueError, match=message):
            picture.check_rows(rows, tmp_path / "q.json")


def test_what_is_not_finite_is_left_blank() -> None:
    line = table([row("full prefill", None, 0.9), row("random", 0.1, 0.5, kl=None)]).splitlines()[-1]
    assert line.startswith("| random | 10% |") and line.endswith("|  |")


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib .*`bench`"):
        load_pyplot(picture.WITHOUT)
