"""lm-evaluation-harness: `--model vllm` gives what `--model hf` gives, sample by sample."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager

from tests.integrations.hugging_face import MODEL, ROOT

TASKS = ("choose", "write")
NUM_DOCS = 4
NUM_CHOICES = 3


def write_tasks(folder: Path) -> None:
    """Write two tasks over the demo data set: choose an answer by its likelihood, and write one."""
    samples = json.loads((ROOT / "inputs" / "musique_s.json").read_text())[:NUM_DOCS]
    answers = list(dict.fromkeys(sample["answers"][0] for sample in samples))
    docs = []
    for sample in samples:
        right = sample["answers"][0]
        wrong = [answer for answer in answers if answer != right][: NUM_CHOICES - 1]
        passages = "".join(f"{passage['text']}\n\n" for passage in sample["ctxs"])
        choices = sorted([right, *wrong])
        docs.append(
            {
                "context": f"{passages}Question: {sample['question']}\nAnswer:",
                "choices": choices,
                "label": choices.index(right),
                "answer": right,
            }
        )
    data = folder / "docs.json"
    data.write_text(json.dumps(docs))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    choose: dict[str, Any] = {"task": "choose", "output_type": "multiple_choice", "doc_to_text": "{{context}}"}
    choose |= {"doc_to_choice": "{{choices}}", "doc_to_target": "label", "metric_list": [{"metric": "acc"}]}
    write: dict[str, Any] = {"task": "write", "output_type": "generate_until", "doc_to_text": "{{context}}"}
    write |= {"doc_to_target": " {{answer}}", "metric_list": [{"metric": "exact_match"}]}
    write |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}}
    for task in (choose, write):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(shared | task))


def by_command(tasks: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the command with `--model vllm`; return both tasks' scores, and the model's responses to every sample."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "vllm", "--include_path", str(tasks)]
    command += ["--tasks", *TASKS, "--batch_size", "4", "--log_samples", "--output_path", str(out)]
    command += ["--model_args", f"pretrained={MODEL},dtype=float32,max_model_len=1024"]
    done = subprocess.run(command, cwd=tasks, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [results] = out.rglob("results_*.json")
    samples = {}
    for task in TASKS:
        [logged] = out.rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in logged.read_text().splitlines()]
    return json.loads(results.read_text())["results"], responses(samples)


def by_hugging_face(tasks: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the same of `--model hf`, without the seconds that another process takes to find the built-in tasks."""
    done = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={MODEL},dtype=float32",
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=4,
        device="cpu",
    )
    assert done is not None
    return done["results"], responses(done["samples"])


def responses(samples: dict[str, list[dict[str, Any]]]) -> dict[str, list[Any]]:
    return {
        task: [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in samples.items()
    }


def test_scores_likelihoods_and_texts_are_those_of_hugging_face(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    scores, ours = by_command(tmp_path, tmp_path / "out")
    expected_scores, theirs = by_hugging_face(tmp_path)

    assert len(ours["choose"]) == NUM_DOCS and all(len(row) == NUM_CHOICES for row in ours["choose"])
    for own_row, their_row in zip(ours["choose"], theirs["choose"], strict=True):
        for (own, own_greedy), (their, their_greedy) in zip(own_row, their_row, strict=True):
            assert float(own) == pytest.approx(float(their), rel=1e-4, abs=1e-4)
            assert str(own_greedy) == str(their_greedy)
    assert ours["write"] == theirs["write"]
    assert all(text.strip() for [text] in ours["write"])
    for task, metric in (("choose", "acc,none"), ("write", "exact_match,none")):
        assert scores[task][metric] == expected_scores[task][metric] > 0
