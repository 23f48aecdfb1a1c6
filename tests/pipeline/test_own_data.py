"""The recipe for people's own data, docs/pipeline.md, run as it stands there, in one process; and the bash scripts of
its stages, one after the other: the same results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from vllm_blend.pipeline.files import read_json

QUESTIONS = 2
RESULTS = "results/owls"
WRITTEN = {
    "retrieval": "retrieval/owls_rag_both_k5.json",
    "prefill": "kv_caches/owls_kv_top5.json",
    "decode": "decoding/speculative_trace.json",
}
STAGES = """
cd /  # the scripts find the project root by themselves
export OUTPUT_DIR=results/stages/retrieval
bash "$OLDPWD/scripts/retrieval/run_retrieval.sh"
unset DATASET_STYLE INSTRUCTION TEMPLATE
export RETRIEVAL_JSON=results/stages/retrieval/owls_rag_both_k5.json OUTPUT_DIR=results/stages/kv_caches
bash "$OLDPWD/scripts/build_kv_cache.sh"
export OUTPUT=results/stages/decoding/speculative_trace.json
bash "$OLDPWD/scripts/decoding/run_speculative_decode.sh" --load-cache-dir results/stages/kv_caches
"""


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


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the scripts run, and which they may write into: they go to the folder above them."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "scripts").mkdir()
    for path in (ROOT / "scripts").iterdir():
        if path.is_dir():
            (folder / "scripts" / path.name).mkdir()
            for script in path.glob("*.sh"):
                (folder / "scripts" / path.name / script.name).write_bytes(script.read_bytes())
        else:
            (folder / "scripts" / path.name).write_bytes(path.read_bytes())
    for name in ("inputs", "configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def printed(recipe: str, checkout: Path) -> str:
    """What the recipe prints. Its data is in the checkout from then on."""
    return run(recipe, checkout)


def test_the_recipe_answers_the_questions_in_the_words_it_gives(printed: str, recipe: str, checkout: Path) -> None:
    assert f"{QUESTIONS} questions" in printed
    assert all(f"{RESULTS}/{name}" in printed for name in WRITTEN.values())
    trace = read_json(checkout / RESULTS / WRITTEN["decode"], "trace")
    assert [result["error"] for result in trace["results"]] == [None] * QUESTIONS
    assert trace["dataset_name"] == "owls" and trace["summary"]["chunks"]["loaded"] >= 2 * QUESTIONS
    config = read_json(checkout / RESULTS / WRITTEN["retrieval"], "retrieval")["config"]
    assert config["dataset_style"] == "musique" and config["template"] == r"Question: {question}\nAnswer:"
    for word in (config["dataset_style"], config["instruction"], config["template"]):
        assert word in recipe


def comparable(stage: str, data: dict[str, Any]) -> Any:
    """Return what does not depend on times and folders."""
    if stage == "decode":
        return [(r["id"], r["prediction"], r["blend"], r["chunks"]) for r in data["results"]]
    return data["results"] if stage == "retrieval" else (data["samples"], data["prefix"], data["model"])


def test_the_single_stages_need_the_wording_once(printed: str, recipe: str, checkout: Path) -> None:
    variables = recipe.replace(f"bash scripts/run_pipeline.sh --results-dir {RESULTS}", "")
    assert variables != recipe and " computed" in run(variables + STAGES, checkout)
    for stage, name in WRITTEN.items():
        one, single = (read_json(checkout / folder / name, stage) for folder in (RESULTS, "results/stages"))
        assert comparable(stage, one) == comparable(stage, single) and len(comparable(stage, one)) >= 2
    chunks = single["summary"]["chunks"]
    assert chunks["missing"] == chunks["foreign"] == 0 and chunks["loaded"] >= 2 * QUESTIONS
    assert [result["error"] for result in single["results"]] == [None] * QUESTIONS
