"""A sweep's file holds what its tables and its picture show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quality.small import ROOT
from tests.quality.test_report import ROWS, row
from vllm_blend.quality.report import render
from vllm_blend.quality.settings import Setting
from vllm_blend.quality.sweep_file import read_sweep, write_sweep

SETTINGS = [Setting("random", {"blend_selector": "random"}, {"blend_check_layers": [1]}, paper="a paper")]


def test_a_file_gives_the_same_tables(tmp_path: Path) -> None:
    about = {"command": "python -m benchmarks.quality", "left out as too long": ["é"]}
    rows = [*ROWS, row("random", 0.0, 0.4, kind="2hop", same_as="plain reuse")]
    rows[3] = rows[3] | {"f1": 1 / 3, "kl": None}
    write_sweep(tmp_path / "deep" / "s.json", about, SETTINGS, rows)
    found_about, settings, found = read_sweep(tmp_path / "deep" / "s.json")
    assert (found_about, settings) == (about, SETTINGS) and len(found) == len(rows) - 1
    assert render(found_about, found, settings) == render(about, rows, SETTINGS)
    assert len((tmp_path / "deep" / "s.json").read_text().splitlines()) == len(found) + 9


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("quality*.json")), ids=lambda p: p.stem)
def test_committed_tables_are_those_of_their_file(path: Path) -> None:
    about, settings, rows = read_sweep(path)
    assert render(about, rows, settings) == path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["[]", "{}", '{"columns": ["kind"], "rows": 3}', '{"columns": 1, "rows": [[]]}'])
def test_another_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match="holds no rows"):
        read_sweep(tmp_path / "s.json")
