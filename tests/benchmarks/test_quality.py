"""The sweep's command: it checks before it works, and writes the same numbers three ways."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import quality
from tests.quality.small import MODEL, ROOT, write_small
from vllm_blend.quality.sweep_file import read_sweep


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_command_writes_json_tables_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", MODEL, "--datasets", str(write_small(tmp_path)), "--ratios", "0", "0.1", "--settings", "random"]
    flags += ["--workers", "1"]
    quality.main([*flags, "--output", str(tmp_path / "deep" / "q.v1")])
    about, settings, rows = read_sweep(tmp_path / "deep" / "q.v1.json")
    assert [(r["setting"], r["ratio"]) for r in rows if r["kind"] == "all"] == [
        ("full prefill", None),
        ("plain reuse", 0.0),
        ("random", 0.0),
        ("random", 0.1),
    ]
    assert [setting.name for setting in settings] == ["random"]
    assert about["questions"] == ["3 of musique_small"] and about["seed"] == 0 and about["model"] == "demo-model"
    assert about["command"].startswith("python -m benchmarks.quality --model ")
    text = (tmp_path / "deep" / "q.v1.md").read_text()
    assert text in capsys.readouterr().out and "| random | 10% |" in text
    picture = tmp_path / "deep" / "q.v1.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    (tmp_path / "deep" / "q.v1.md").unlink()
    quality.main(["--report", str(tmp_path / "deep" / "q.v1.json")])
    assert (tmp_path / "deep" / "q.v1.md").read_text() == text and picture.exists()


def test_mistakes_are_found_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "sweep_by", lambda *args: pytest.fail("work began"))
    for flags, message in (
        (["--settings", "randm"], "'randm' is unknown"),
        (["--ratios", "0", "2"], "a ratio=2.0"),
        (["--datasets", str(tmp_path / "musique.json")], "not found"),
        (["--samples", "-1"], "use 1 or more"),
        (["--seed", "-1"], "--seed is -1"),
        (["--workers", "0"], "the number of workers is 0"),
        (["--report", str(tmp_path / "q.json")], "rows not found"),
        (["--report", str(ROOT / "inputs/musique_s.json")], "holds no rows"),
        (["--output", str(ROOT / "pyproject.toml" / "q")], "is a file, not a folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            quality.main([*flags, "--no-picture"])
        assert ended.value.code == 1 and message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        quality.main([])
    assert "pip install matplotlib" in capsys.readouterr().err
