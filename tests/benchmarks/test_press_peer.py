"""kvpress as a peer: what its worker answers, by an interpreter whose kvpress is a stand-in that keeps everything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.side import press_peer
from tests.engine.engines import DEMO, engine
from vllm_blend import SamplingParams

pytestmark = pytest.mark.cpu_only

PACKAGE = """
from contextlib import contextmanager

class KeyDiffPress:
    def __init__(self, compression_ratio):
        assert compression_ratio == 0.75

    @contextmanager
    def __call__(self, model):
        yield
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program that runs this Python with the stand-in."""
    site = tmp_path / "site"
    (site / "kvpress-9.9.dist-info").mkdir(parents=True)
    (site / "kvpress-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpress\nVersion: 9.9\n")
    (site / "kvpress.py").write_text(PACKAGE)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


def test_a_press_that_keeps_everything_answers_as_the_engine_does(python: Path) -> None:
    texts = ["Tulmaris Works makes lenses.\n\nQuestion: What does Tulmaris Works make?\nAnswer:", "Jorholm is"]
    with engine(DEMO) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, stop=["\n"])
        outputs = llm.generate(texts, params, use_tqdm=False)
    prompts = [list(output.prompt_token_ids) for output in outputs]
    runs = [(None, 1.0), ("KeyDiffPress", 0.25)]
    versions, answers = press_peer.ask(python, DEMO, prompts, runs, max_tokens=8, stop="\n")
    assert versions["kvpress"] == "9.9" and versions.keys() == {"kvpress", "transformers"}
    expected = [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]
    assert answers == [expected, expected]


def test_what_an_interpreter_says_that_cannot_run_the_worker_is_passed_on(python: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "kvpress.py").write_text("raise ImportError('kvpress needs another torch')\n")
    with pytest.raises(ValueError, match=r"(?s)failed with status 1.*ImportError: kvpress needs another torch"):
        press_peer.ask(python, DEMO, [[5, 6]], [("KeyDiffPress", 0.5)], max_tokens=1, stop="\n")
    with pytest.raises(ValueError, match=r"--kvpress-python .*missing: .*give an interpreter that has kvpress"):
        press_peer.ask(tmp_path / "missing", DEMO, [[5]], [], max_tokens=1, stop="\n")
