"""The recipe for people's own data, docs/pipeline.md, run as it stands there; and its file, stage by stage."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from vllm_blend.pipeline.files import read_json

QUESTIONS = 2


def run(command: str, folder: Path) -> str:
    """Run bash in a folder that has the scripts, the inputs and a `results` of its own, and return what it prints."""
    settings = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def recipe() -> str:
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    [block] = re.findall(r"## Your own data\n.*?```bash\n(.*?)```", text, re.DOTALL)
    return str(block)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder in which the scripts run, and which they may write into: they go to the folder above them."""
    (tmp_path / "scripts").mkdir()
    for path in (ROOT / "scripts").iterdir():
        if path.is_dir():
            (tmp_path / "scripts" / path.name).mkdir()
            for script in path.glob("*.sh"):
                (tmp_path / "scripts" / path.name / script.name).write_bytes(script.read_bytes())
        else:
            (tmp_path / "scripts" / path.name).write_bytes(path.read_bytes())
    for name in ("inputs", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def test_the_recipe_answers_the_questions_in_the_words_it_gives(recipe: str, checkout: Path) -> None:
    printed = run(recipe, checkout)
    assert f"{QUESTIONS} questions" in printed
    trace = read_json(checkout / "results/owls/decoding/speculative_trace.json", "trace")
    assert [result["error"] for result in trace["results"]] == [None] * QUESTIONS
    assert trace["dataset_name"] == "owls" and trace["summary"]["chunks"]["loaded"] >= 2 * QUESTIONS
    config = read_json(checkout / "results/owls/retrieval/owls_rag_both_k5.json", "retrieval")["config"]
    assert config["dataset_style"] == "musique" and config["template"] == r"Question: {question}\nAnswer:"
    for word in (config["dataset_style"], config["instruction"], config["template"]):
        assert word in recipe


def test_the_single_stages_need_the_wording_once(recipe: str, checkout: Path) -> None:
    variables = recipe.replace("bash scripts/run_pipeline.sh --results-dir results/owls", "")
    stages = """
bash scripts/retrieval/run_retrieval.sh
unset DATASET_STYLE INSTRUCTION TEMPLATE
bash scripts/build_kv_cache.sh
bash scripts/decoding/run_speculative_decode.sh
"""
    assert " computed" in run(variables + stages, checkout)
    trace = read_json(checkout / "results/decoding/speculative_trace.json", "trace")
    chunks = trace["summary"]["chunks"]
    assert chunks["missing"] == chunks["foreign"] == 0 and chunks["loaded"] >= 2 * QUESTIONS
    assert [result["error"] for result in trace["results"]] == [None] * QUESTIONS
