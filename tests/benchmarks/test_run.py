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
    assert run.main(["cpu", "--only", "works", "fails", "--no-png", "--output", str(tmp_path / "report")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    works, fails = report["runs"]
    assert works["command"] == f"python -m {WORKS}" and works["status"] == 0 and "1 loop" in works["output"][0]
    assert fails["status"] == 1 and "undefined_name" in "\n".join(fails["output"])
    about = report["about"]
    assert about["device"] == "cpu" and about["cores"] >= 1 and "torch" in about["versions"] and about["processor"]
    page = (tmp_path / "report.md").read_text()
    assert "## works" in page and "It failed with status 1" in page and f"| commit | {about['commit']} |" in page


def test_an_absent_peer_is_said_to_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"transformers": "5.0", "vllm": "0.9"}  # the name vllm may be our alias
    monkeypatch.setattr(run, "installed", found.get)
    monkeypatch.setitem(run.BENCHMARKS, "cpu", {"engine": WORKS, "other": WORKS})
    assert run.main(["cpu", "--only", "other", "--no-png", "--output", str(tmp_path / "report")]) == 0
    peers = json.loads((tmp_path / "report.json").read_text())["about"]["peers"]
    assert peers["vllm"] == "absent: no --vllm-python was given"
    assert peers["kvpress"] == "absent: no --kvpress-python was given"
    assert peers["transformers"] == "5.0 is installed, but no benchmark of this run times it"
    assert f"- vllm: {peers['vllm']}" in (tmp_path / "report.md").read_text()
    assert run.peers("cpu", ["engine"], {})["transformers"] == "5.0, timed in engine"
    given = run.peers("cpu", ["side_by_side"], {"vllm": Path("python")})
    assert given["vllm"] == "compared in side_by_side, which says its version"
    assert given["kvpress"] == "absent: no --kvpress-python was given"


def test_the_interpreter_of_a_peer_goes_to_the_benchmark_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[str, list[str]]] = []

    def pretend(name: str, command: str, output: Path, more: list[str]) -> dict[str, object]:
        commands.append((name, more))
        return {"name": name, "command": "", "status": 0, "seconds": 0.0, "output": [], "samples": []}

    monkeypatch.setattr(run, "run", pretend)
    options = ["--no-png", "--vllm-python", "/vllm/python", "--output", str(tmp_path / "report")]
    assert run.main(["cpu", "--only", "engine", "side_by_side", *options]) == 0
    assert commands == [("engine", []), ("side_by_side", ["--vllm-python", "/vllm/python"])]
    with pytest.raises(SystemExit):
        run.main(["cpu", "--only", "engine", *options])
    assert "--vllm-python is for side_by_side alone" in capsys.readouterr().err
    commands.clear()
    options[1:3] = ["--kvpress-python", "/press/python"]
    assert run.main(["cpu", "--only", "compression", "engine", *options]) == 0
    assert commands == [("compression", ["--kvpress-python", "/press/python"]), ("engine", [])]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit):
        run.main(["gpu", "--only", "engine", *options])
    assert "--kvpress-python is for compression, which does not run on gpu" in capsys.readouterr().err


def test_without_a_device_the_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "say which device: cpu or gpu" in said and "cpu: engine, chunks, disk" in said
    with pytest.raises(SystemExit):
        run.main(["tpu"])
    assert "invalid choice: 'tpu'" in capsys.readouterr().err


def test_a_picture_shows_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.BENCHMARKS, "cpu", {"works": WORKS})

    def pretend(name: str, command: str, output: Path, more: list[str]) -> dict[str, object]:
        rows = [{"name": "a row", "seconds": [0.1, 0.2, 0.4]}, {"name": "another", "seconds": [0.01]}]
        return {"name": name, "command": command, "status": 0, "seconds": 0.0, "output": [], "samples": rows}

    monkeypatch.setattr(run, "run", pretend)
    assert run.main(["cpu", "--output", str(tmp_path / "report")]) == 0
    picture = (tmp_path / "report.png").read_bytes()
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert picture.startswith(b"\x89PNG") and width == 1560 and height > 100


def test_without_matplotlib_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "find_spec", {"matplotlib": None}.get)
    with pytest.raises(SystemExit):
        run.main(["cpu", "--output", str(tmp_path / "folder" / "report")])
    assert 'pip install -e ".[bench]", or pass --no-png' in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()


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
