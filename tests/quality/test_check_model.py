"""`vllm-blend check-model`: what it prints, writes and keeps, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.quality.broken import StepPositions
from tests.quality.small import MODEL, ROOT, small_samples, write_small
from vllm_blend.command_line import BAD_INPUT
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints import cli
from vllm_blend.entrypoints.verdicts import FILE, read_verdict
from vllm_blend.models.registry import MODEL_REGISTRY
from vllm_blend.pipeline.files import read_json, write_json
from vllm_blend.quality import check_model as module
from vllm_blend.quality import yardstick
from vllm_blend.quality.questions import Questions

FEW = ["--min-questions", "1", "--batch", "4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model in a folder that may be written to."""
    return str(shutil.copytree(MODEL, tmp_path_factory.mktemp("models") / "demo"))


def test_the_command_prints_writes_and_keeps_the_verdict(
    data: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", str(data), *FEW, "--rules", "none", "random@0.9", "--output", str(tmp_path / "c.json")]
    assert cli.main(["check-model", model, *flags]) == 3  # three questions show nothing for certain
    printed = capsys.readouterr()
    written = read_json(tmp_path / "c.json", "verdict")
    assert [row["setting"] for row in written["rows"]][2:] == ["none (filler)", "random 90% (filler)"]
    assert written["state"] == "uncertain" and written["best"] == {"rule": "random", "ratio": 0.9, "company": "filler"}
    assert written["text"] in printed.out and "| random 90% (filler) | " in printed.out
    assert "everything recomputed, against full prefill: KL" in printed.out
    assert "musique_small: 3 questions, read as passages, asked by style musique" in printed.err
    assert "measure: 100%" in printed.err
    [heads] = [line for line in printed.out.splitlines() if line.startswith("| setting | work |")]
    for head in heads.strip("| ").split(" | ")[1:]:  # what the reader of the table cannot guess is explained below it
        assert f"`{head}`" in printed.out, head
    kept = read_verdict(EngineArgs(model=model, enable_blending=True).create_engine_config())
    assert kept is not None and kept.path == Path(model) / FILE and kept.text == written["text"]
    assert f"The verdict is kept in {kept.path}" in printed.out
    assert kept.state_of("random", 0.9, "filler") == "uncertain"


def test_a_quick_look_keeps_nothing(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copy(data, tmp_path / "musique_other.json")
    flags = [
        "--data",
        str(data),
        str(other),
        "--quick",
        "--samples",
        "2",
        "--chunk-store-path",
        str(tmp_path / "store"),
    ]
    assert module.main([MODEL, *flags]) in (1, 3)
    out = capsys.readouterr().out
    assert (
        "musique_small, 2 questions" in out
        and "musique_other, 2 questions" in out
        and "| question_attention 8% (filler) |" in out
    )
    assert "The verdict is kept" not in out and not (tmp_path / "store").exists()


def test_a_broken_model_is_refused_with_a_reason(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODEL_REGISTRY, "LlamaForCausalLM", StepPositions)
    assert module.main([MODEL, "--data", str(data), *FEW, "--chunk-store-path", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("Refused: do not blend this model.") and "positions that count from the step's first" in out
    assert "| full prefill |" not in out
    kept = read_verdict(
        EngineArgs(model=MODEL, enable_blending=True, chunk_store_path=str(tmp_path)).create_engine_config()
    )
    assert kept is not None and kept.state == "fails" and "positions that count from the step's first" in kept.text


def test_the_memory_bounds_the_batch(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FEW, "--rules", "none", "--blend-chunk-cache-gib", "0.0086", "--chunk-store-path", str(tmp_path)]
    assert module.main([MODEL, "--data", str(data), *flags]) in (1, 3)
    assert "2 prompts at a time, as the memory for KV holds no more of" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "count"), [([], 3), (["--samples", "1"], 1), (["--min-questions", "4"], 3)])
def test_fewer_questions_than_a_verdict_takes_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str], flags: list[str], count: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main([str(data), "--data", str(data), *flags])  # no model is loaded for that
    said = capsys.readouterr().err
    assert ended.value.code == BAD_INPUT and f"musique_small has {count} question" in said
    assert f"give at least {flags[-1] if '--min-questions' in flags else 50}" in said
    assert f"allow fewer with --min-questions {count}" in said


def test_questions_that_the_model_cannot_hold_do_not_count(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def without_the_last(questions: Questions, engine: LLMEngine) -> Questions:
        return replace(questions, samples=questions.samples[:-1], left_out=("the last",))

    monkeypatch.setattr(yardstick, "select_fitting", without_the_last)
    with pytest.raises(SystemExit) as ended:
        module.main([MODEL, "--data", str(data), "--min-questions", "3", "--chunk-store-path", str(tmp_path)])
    said = capsys.readouterr().err
    assert ended.value.code == BAD_INPUT and "has 2 questions that can be asked, too few" in said
    assert "left out: 1 are too long" in said


def test_what_memory_does_not_hold_is_no_verdict(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def crowded(*args: Any) -> None:
        raise RuntimeError("the KV cache has no room for 16 prompts at a time")

    monkeypatch.setattr(yardstick, "check_exactness", crowded)
    with pytest.raises(SystemExit) as ended:
        module.main([MODEL, "--data", str(data), *FEW, "--chunk-store-path", str(tmp_path)])
    assert ended.value.code == BAD_INPUT and "no room for 16 prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-f1-loss", "5"], "--max-f1-loss 5.0 is a difference"),
        (["--min-agreement", "80"], "--min-agreement 80.0 is a share"),
        (["--rules", "randm"], "'randm' is unknown"),
        (["--companies", "pages"], "blend_encoding_context='pages'"),
        (["--samples", "0"], "use 1 or more"),
        (["--batch", "0"], "batch is 0"),
        (["--min-questions", "0"], "--min-questions 0 must be at least 1"),
        (["--seed", "-1"], "--seed is -1: use 0 or more"),
        (["--data", "no/musique.json"], "not found"),
        (["--style", "hotpot"], "'hotpot' is unknown"),
        (["--template", "Why"], "--template='Why' must hold {question} once"),
        (["--output", str(ROOT / "pyproject.toml" / "c.json")], "is a file, not a folder"),
        (["--output", str(ROOT / "tests")], "tests is a folder: give a file"),
    ],
)
def test_bad_input_ends_with_a_message(
    data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main([MODEL, "--data", str(data), *FEW, "--chunk-store-path", str(tmp_path), *flags])
    assert ended.value.code == BAD_INPUT and message in capsys.readouterr().err


def test_files_are_named_before_a_model_is_loaded(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_json(tmp_path / "musique.json", [small_samples(1)[0] | {"question": ""}])
    twice = shutil.copy(data, tmp_path / data.name)
    for files, message in (
        ([data], str(tmp_path / "none")),
        ([broken], "sample 0: question must be a non-empty string"),
        ([data, twice], "two data sets are called 'musique_small'"),
    ):
        with pytest.raises(SystemExit) as ended:
            module.main([str(tmp_path / "none"), "--data", *map(str, files), *FEW])
        assert ended.value.code == BAD_INPUT and message in capsys.readouterr().err


def test_hotpotqa_is_asked_by_the_chat_template(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A published file, and a model with a chat template: its prompts reach the engine as the template makes them."""
    raws = [
        {"question": raw["question"], "answer": raw["answers"][0], "context": [["T", [c["text"]]] for c in raw["ctxs"]]}
        for raw in small_samples(2)
    ]
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, raws)))
    folder = Path(shutil.copytree(model, tmp_path / "chat"))
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}Answer:"
    )
    assert module.main([str(folder), "--data", str(tmp_path / "dev.jsonl"), *FEW, "--rules", "none"]) == 1
    printed = capsys.readouterr()
    assert "dev: 2 questions, read as HotpotQA or 2WikiMultihopQA, asked by chat template" in printed.err
    assert "dev: cannot tell: full prefill itself has F1" in printed.out  # the demo model knows no such prompt
