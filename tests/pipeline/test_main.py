"""`python -m vllm_blend.pipeline` says which stages there are, and runs one of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vllm_blend.pipeline.__main__ import STAGES, main

pytestmark = pytest.mark.cpu_only
FOLDER = Path(__file__).parents[2] / "vllm_blend" / "pipeline"


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])  # the pipeline sets it


def test_every_program_of_the_folder_is_a_stage() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py") if "\ndef main(" in path.read_text()}
    assert set(STAGES) == programs - {"__main__"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ([], "error: name a stage"),
        (["nothing"], "error: there is no stage 'nothing'\n"),
        (["build-kv-cache", "--top-k", "3"], "error: there is no stage 'build-kv-cache': did you mean build_kv_cache?"),
    ],
)
def test_without_a_stage_the_usage_is_printed(given: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("usage: python -m vllm_blend.pipeline STAGE") and error in said.err
    assert all(f"  {stage} " in said.err for stage in STAGES)


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "speculative_decode" in capsys.readouterr().out


def test_a_stage_runs_with_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predictions = tmp_path / "predictions.json"
    predictions.write_text(json.dumps([{"prediction": "Turin", "answers": ["Turin"], "style": "musique"}]))
    assert main(["evaluate", "--predictions", str(predictions)]) == 0
    assert "100" in capsys.readouterr().out


def test_a_wrong_flag_shows_how_the_stage_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate"])
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "vllm_blend.pipeline evaluate [-h] --predictions" in error
