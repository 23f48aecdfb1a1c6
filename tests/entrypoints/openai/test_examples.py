"""The examples that talk to a server, as their docstrings say that they are run."""

from __future__ import annotations

import re
import runpy
import sys

import pytest

from tests.engine.engines import ROOT
from tests.entrypoints.openai.servers import TestServer

pytestmark = pytest.mark.cpu_only


def run(name: str, server: TestServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what an example prints for a server without options."""
    monkeypatch.setattr(sys, "argv", [name, f"{server.plain_url}/v1"])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    return capsys.readouterr().out


def numbers(pattern: str, text: str) -> list[int]:
    return [int(found) for found in re.findall(pattern, text)]


def test_passages_in_plain_text(
    server: TestServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are computed, then stored, then reused; the answers stay right."""
    printed = run("server_rag.py", server, monkeypatch, capsys)
    for answer in ("make? boats", "Yiamdond? Chumston Yomdrior", "Viaxvias? Lesschial", "Union? Klenem Deazol"):
        assert f"{answer}\n" in printed
    reused, stored = numbers(r"(\d+) of them in passages", printed), numbers(r"(\d+) computed for", printed)
    totals = numbers(r"(\d+) prompt", printed)
    assert reused[:2] == [0, 0] and stored[0] == 0
    assert stored[1] > totals[1] / 2 and reused[2] > totals[2] / 2 and reused[3] > totals[3] / 2


def test_an_agent_whose_context_grows(
    server: TestServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every passage is computed for the store once: in all turns together, less than the last prompt has."""
    printed = run("server_agent.py", server, monkeypatch, capsys)
    for answer in ("Kaimsha Piaka found? Jixstai Company", "Jixstai Company? Niaceal", "Niaceal? Biasschind"):
        assert f"{answer}\n" in printed
    reused, stored = numbers(r"(\d+) reused", printed), numbers(r"(\d+) computed for", printed)
    totals = numbers(r"(\d+) prompt", printed)
    assert reused[0] < reused[1] < reused[2]  # what other tests have stored may be the token that begins a prompt
    assert sum(stored) < totals[-1]
