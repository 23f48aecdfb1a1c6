"""Answers of two held-out files are compared question by question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.same_answers import main
from tests.checkout import ROOT

pytestmark = pytest.mark.cpu_only

COMMITTED = ROOT / "benchmarks" / "results" / "held_out_test_long_reuse.json"


def test_the_same_answers_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(COMMITTED), str(COMMITTED)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and all("501 questions, 0 answered otherwise" in line for line in lines)


def test_another_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(COMMITTED.read_text())
    run = data["cells"][0]["runs"][1]
    place = run["correct"].index("1")
    run["correct"] = run["correct"][:place] + "0" + run["correct"][place + 1 :]
    run["wrong"].insert(run["correct"][:place].count("0"), "something else")
    (changed := tmp_path / "changed.json").write_text(json.dumps(data))
    assert main([str(changed), str(COMMITTED)]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "1 answered otherwise" in line]
    assert line.startswith("8 families, plain: plain reuse at 0%:") and "test-5400" in line


def test_other_weights_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(COMMITTED), str(COMMITTED.with_name("held_out_test_long.json"))])
    assert ended.value.code == 2 and "other weights" in capsys.readouterr().err
