"""Every benchmark runs as `python -m benchmarks.<name>`, and is documented to."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.checkout import ROOT

FOLDER = ROOT / "benchmarks"
COMMANDS = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if path.stem
    not in (
        "__init__",
        "answers",
        "bad_bodies_cases",
        "gpu_account",
        "passages",
        "ray_requests",
        "sample_picture",
        "samples",
        "server_watch",
        "serving_requests",
    )
)
TEXTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *FOLDER.rglob("*.md"), *FOLDER.rglob("*.py")]


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", COMMANDS)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")  # in this process: importing torch takes seconds
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"python -m benchmarks.{name}" in text and "--help" in text


@pytest.mark.cpu_only
def test_no_text_says_otherwise() -> None:
    for path in TEXTS:
        text = path.read_text()
        assert not re.findall(r"python3? benchmarks/\S*", text), path
        assert set(re.findall(r"python -m benchmarks\.(\w+)", text)) <= set(COMMANDS), path
