"""`python -m benchmarks.run` writes what its benchmarks say, also of those that fail, and what they ran on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import run, samples

WORKS = "timeit -n 1 -r 1 -s pass pass"
FAILS = "timeit -n 1 -s undefined_name pass"


def test_the_report_has_outputs_failures_and_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.BENCHMARKS, "cpu", {"works": WORKS, "fails": FAILS, "other": WORKS})
    assert run.main(["cpu", "--only", "works", "fails", "--output", str(tmp_path / "report")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    works, fails = report["runs"]
    assert works["command"] == f"python -m {WORKS}" and works["status"] == 0 and "1 loop" in works["output"][0]
    assert fails["status"] == 1 and "undefined_name" in "\n".join(fails["output"])
    about = report["about"]
    assert about["device"] == "cpu" and about["cores"] >= 1 and "torch" in about["versions"] and about["processor"]
    page = (tmp_path / "report.md").read_text()
    assert "## works" in page and "It failed with status 1" in page and f"| commit | {about['commit']} |" in page


def test_an_absent_peer_is_said_to_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"transformers": "5.0", "kvpress": "0.4"}
    monkeypatch.setattr(run, "installed", found.get)
    monkeypatch.setitem(run.BENCHMARKS, "cpu", {"engine": WORKS, "other": WORKS})
    assert run.main(["cpu", "--only", "other", "--output", str(tmp_path / "report")]) == 0
    peers = json.loads((tmp_path / "report.json").read_text())["about"]["peers"]
    assert peers["vllm"].startswith("absent: not installed here")
    assert peers["transformers"] == "5.0 is installed, but no benchmark of this run times it"
    assert f"- vllm: {peers['vllm']}" in (tmp_path / "report.md").read_text()
    assert run.peers("cpu", ["engine"])["transformers"] == "5.0, timed in engine"


def test_tables_stay_tables() -> None:
    rows = ["| a | b |", "|---|---|", "| 1 | 2 |"]
    each = {"name": "x", "command": "python -m x", "status": 0, "seconds": 1.0, "output": rows, "samples": []}
    page = run.render({"about": {"processor": "p", "versions": {}}, "runs": [each]})
    assert "\n".join(rows) in page and "```text" not in page
    page = run.render({"about": {"processor": "p", "versions": {}}, "runs": [each | {"output": ["1 ms"]}]})
    assert "```text\n1 ms\n```" in page


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["cpu", "--only", "nothing"])
    assert "--only nothing: on cpu there are engine, " in capsys.readouterr().err


def test_samples_are_kept_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(samples.VARIABLE, raising=False)
    samples.record("lost", [1.0])
    assert samples.read(tmp_path / "none") == []
    monkeypatch.setenv(samples.VARIABLE, str(tmp_path / "kept"))
    samples.record("one", [0.5, 0.25])
    samples.record("two", (1.0,))
    assert samples.read(tmp_path / "kept") == [
        {"name": "one", "seconds": [0.5, 0.25]},
        {"name": "two", "seconds": [1.0]},
    ]


def test_every_benchmark_exists() -> None:
    for commands in run.BENCHMARKS.values():
        for command in commands.values():
            assert (run.ROOT / (command.split()[0].replace(".", "/") + ".py")).exists(), command
