"""The sweep's command: it checks before it works, and writes the same numbers three ways."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import quality
from tests.pipeline.quality.small import MODEL, ROOT, write_small
from vllm_blend.pipeline.files import read_json


def test_the_command_writes_json_tables_and_a_picture(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--model", MODEL, "--datasets", str(write_small(tmp_path)), "--ratios", "0", "0.1", "--settings", "random"]
    flags += ["--workers", "1"]
    quality.main([*flags, "--output", str(tmp_path / "deep" / "q.v1")])
    written = read_json(tmp_path / "deep" / "q.v1.json", "rows")
    assert [(r["setting"], r["ratio"]) for r in written["rows"] if r["kind"] == "all"] == [
        ("full prefill", None),
        ("plain reuse", 0.0),
        ("random", 0.0),
        ("random", 0.1),
    ]
    about = written["about"]
    assert about["questions"] == ["3 of musique_small"] and about["seed"] == 0 and about["model"] == "demo-model"
    assert about["command"].startswith("python -m benchmarks.quality --model ")
    text = (tmp_path / "deep" / "q.v1.md").read_text()
    assert text in capsys.readouterr().out and "| random | 10% |" in text
    assert (tmp_path / "deep" / "q.v1.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_found_before_anything_is_loaded(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(quality, "sweep_by", lambda *args: pytest.fail("work began"))
    for flags, message in (
        (["--settings", "randm"], "'randm' is unknown"),
        (["--ratios", "0", "2"], "a ratio=2.0"),
        (["--datasets", str(tmp_path / "musique.json")], "not found"),
        (["--samples", "-1"], "use 1 or more"),
        (["--seed", "-1"], "--seed is -1"),
        (["--workers", "0"], "the number of workers is 0"),
        (["--draw", str(tmp_path / "q.json")], "rows not found"),
        (["--draw", str(ROOT / "inputs/musique_s.json")], "holds no rows"),
        (["--output", str(ROOT / "pyproject.toml" / "q")], "is a file and no folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            quality.main([*flags, "--no-picture"])
        assert ended.value.code == 1 and message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        quality.main([])
    assert "pip install matplotlib" in capsys.readouterr().err
