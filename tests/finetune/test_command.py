"""`vllm-blend finetune`: a tiny model learns a data set, and bad input is refused before any work."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.engine.engines import DEMO, ROOT, engine, greedy, run, tiny_model
from vllm_blend.finetune import measure
from vllm_blend.finetune.command import main
from vllm_blend.finetune.plan import TrainingPlan
from vllm_blend.finetune.saving import save_model
from vllm_blend.pipeline.datasets import normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt

pytestmark = pytest.mark.cpu_only

MUSIQUE = str(ROOT / "inputs/musique_s.json")
SAMPLES = [
    {"ctxs": [{"title": "", "text": "a b"}, {"title": "", "text": "c"}], "question": "who", "answers": [answer]}
    for answer in ("x", "y")
]


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    path = tmp_path / "musique_tiny.json"
    path.write_text(json.dumps(SAMPLES))
    return str(path)


@pytest.fixture
def model() -> str:
    return tiny_model("qwen3", max_position_embeddings=512)


def finetune(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_the_model_learns_its_answers_reused_and_in_full(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new"
    options = ["--steps", 60, "--batch-size", 8, "--learning-rate", 0.02, "--warmup-steps", 5, "--log-steps", 30]
    data = json.loads(Path(dataset).read_text())[:1]
    Path(dataset).write_text(json.dumps(data))
    assert finetune(model, "--output", output, "--dataset", dataset, "--device", "cpu", *options) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [int(line.split()[1]) for line in lines] == [1, 10, 30, 60]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert losses[-1] < losses[0] / 4
    assert "isolated 100.0%" in lines[-1]
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.encode("who") == AutoTokenizer.from_pretrained(model).encode("who")
    prompt = build_qa_prompt(normalize_sample(data[0]), "musique")
    with engine(str(output), enable_blending=True, blend_recompute_ratio=0.0) as llm:
        parts: list[Any] = [prompt["prefix"], *prompt["chunks"], prompt["suffix"]]
        whole: Any = {"prompt": "".join(parts)}
        for asked in (prompt, whole):
            [answer] = run(llm, asked, greedy(4, stop="\n"))
            assert answer.outputs[0].text.strip() == "x"


def test_a_checkpoint_is_replaced_by_the_end(model: str, dataset: str, tmp_path: Path) -> None:
    output = tmp_path / "new"
    options = ["--steps", 3, "--save-minutes", 1e-9, "--batch-size", 2, "--device", "cpu"]
    assert finetune(model, "--output", output, "--dataset", dataset, *options) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    saved = AutoModelForCausalLM.from_pretrained(output)
    before = AutoModelForCausalLM.from_pretrained(model)
    assert saved.dtype == before.dtype
    changed = [not torch.equal(a, b) for a, b in zip(saved.parameters(), before.parameters(), strict=True)]
    assert all(changed)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dataset", MUSIQUE], "give --minutes or --steps"),
        (["--dataset", MUSIQUE, "--minutes", "0"], "--minutes is 0.0"),
        (["--dataset", MUSIQUE, "--steps", "1", "--full", "2"], "--full is 2.0"),
        (["--dataset", MUSIQUE, "--steps", "1", "--max-length", "2048"], "the model has 1024 positions"),
        (["--dataset", MUSIQUE, "--steps", "1", "--max-length", "40"], "none of the 150 samples fits 40 tokens"),
        (["--dataset", "missing_musique.json", "--steps", "1"], "data set not found: missing_musique.json"),
        (["--dataset", MUSIQUE, "--steps", "1", "--style", "quiz"], "--style 'quiz' is unknown"),
        (["--dataset", MUSIQUE, "--steps", "1", "--max-length", "0"], "--max-length is 0: use 1 to 1024"),
        (["--dataset", MUSIQUE, "--minutes", "inf"], "--minutes is inf"),
        (["--dataset", MUSIQUE, "--steps", "1", "--learning-rate", "nan"], "--learning-rate is nan"),
        (["--dataset", MUSIQUE, "--steps", "1", "--weight-decay", "nan"], "--weight-decay is nan"),
        (["--dataset", MUSIQUE, "--steps", "1", "--isolated", "nan"], "--isolated is nan"),
        (["--worlds", "--steps", "1", "--max-length", "100"], "worlds fit 96 tokens"),
        (["--worlds", "--steps", "1", "--workers", "-1"], "--workers is -1"),
        (["--worlds", "--steps", "1", "--seed", "99"], "--seed is 99"),
        (["--worlds", "--steps", "1", "--lengths", "2048"], "the model has 1024 positions"),
        (["--worlds", "--steps", "1", "--lengths", "1000", "--length-shares", "1", "2"], "--length-shares has 2"),
        (["--worlds", "--steps", "1", "--batch-size", "6", "--accumulate", "4"], "a multiple of --accumulate 4"),
        (["--worlds", "--steps", "1", "--resume"], "has no training_state.pt"),
        (["--worlds", "--steps", "1", "--teacher", DEMO], "without --distill"),
        (
            ["--worlds", "--steps", "1", "--distill", "1", "--teacher", "a.gguf"],
            "'a.gguf' is a GGUF file, and models are",
        ),
        (["--dataset", MUSIQUE, "--steps", "1", "--target", "0.9"], "--target 0.9 needs development rows"),
        (["--dataset", MUSIQUE, "--steps", "1", "--lora-rank", "-1"], "--lora-rank is -1"),
        (["--dataset", MUSIQUE, "--steps", "1", "--lora-rank", "100000"], "--lora-rank is 100000: use at most 1024"),
        (["--dataset", MUSIQUE, "--steps", "1", "--decay-share", "2"], "--decay-share is 2.0: it must be a number in"),
        ([], "give --worlds, or --dataset FILE"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        finetune(DEMO, "--output", tmp_path / "new", *arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_data_set_without_a_style_is_refused(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(dataset).rename(tmp_path / "mine.json")
    with pytest.raises(SystemExit):
        finetune(model, "--output", tmp_path / "new", "--dataset", mine, "--steps", "1")
    assert "rename the file, or name the style (--style" in capsys.readouterr().err


def test_an_output_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(SystemExit):
        finetune(DEMO, "--output", tmp_path, "--worlds", "--steps", "1")
    assert "is not an empty folder" in capsys.readouterr().err


def test_an_output_below_a_file_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit):
        finetune(DEMO, "--output", tmp_path / "file" / "new", "--worlds", "--steps", "1")
    assert "is a file, not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("answers", [[], [[]], None, [3]])
def test_a_data_set_without_answers_is_refused(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: Any
) -> None:
    Path(dataset).write_text(json.dumps([SAMPLES[0], {**SAMPLES[1], "answers": answers}]))
    with pytest.raises(SystemExit):
        finetune(model, "--output", tmp_path / "new", "--dataset", dataset, "--steps", "1")
    assert "sample 1: answers must" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_one_chunk_is_enough_and_nothing_need_be_recomputed(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sample that is too long is left out, and counted."""
    one = {**SAMPLES[0], "ctxs": SAMPLES[0]["ctxs"][:1]}
    Path(dataset).write_text(json.dumps([one, {**one, "ctxs": [{"text": "too long " * 200}]}]))
    options = ["--steps", 2, "--batch-size", 4, "--max-recomputed", 0, "--device", "cpu", "--max-length", 300]
    assert finetune(model, "--output", tmp_path / "new", "--dataset", dataset, *options) == 0
    assert "1 samples are left out as longer than 300 tokens" in capsys.readouterr().out


def test_a_training_that_diverges_ends_with_an_error(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--steps", 20, "--learning-rate", 1e30, "--warmup-steps", 0, "--device", "cpu", "--save-minutes", 1e-9]
    with pytest.raises(SystemExit) as ended:
        finetune(model, "--output", tmp_path / "new", "--dataset", dataset, "--batch-size", 2, *options)
    assert ended.value.code == 2 and "the model is ruined: lower --learning-rate" in capsys.readouterr().err


def test_a_folder_with_a_configuration_has_whole_weights(
    model: str, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If saving is cut short, the folder does not pass for a model."""
    moved: list[str] = []

    def cut_short(source: Path, target: Path, move: Any = os.replace) -> None:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(Path(target).name)
        move(source, target)

    output = tmp_path / "new"
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    with monkeypatch.context() as patch:
        patch.setattr("vllm_blend.finetune.saving.os.replace", cut_short)
        with pytest.raises(KeyboardInterrupt):
            save_model(stock, tokenizer, torch.float32, output)
    assert len(moved) == 2 and not (output / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    everything: list[str] = []

    def noted(source: Path, target: Path, move: Callable[[Path, Path], None] = os.replace) -> None:
        everything.append(Path(target).name)
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("vllm_blend.finetune.saving.os.replace", noted)
        save_model(stock, tokenizer, torch.float32, output)
    assert everything[-1] == "config.json" and "model.safetensors" in everything
    AutoModelForCausalLM.from_pretrained(output)


def test_a_data_set_without_chunks_is_refused(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(dataset).write_text(json.dumps([{**SAMPLES[0], "ctxs": []}]))
    with pytest.raises(SystemExit):
        finetune(model, "--output", tmp_path / "new", "--dataset", dataset, "--steps", "1")
    assert "ctxs must be a non-empty list" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--worlds", "--output", tmp_path / "new"], ["--measure-only"]):
        with pytest.raises(SystemExit):
            finetune(tmp_path / "missing", "--steps", 1, *options)
        assert f"{tmp_path / 'missing'}" in capsys.readouterr().err


def test_a_teacher_of_another_vocabulary_is_refused(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dataset", dataset, "--steps", 1, "--distill", 1, "--teacher", DEMO]
    with pytest.raises(SystemExit):
        finetune(model, "--output", tmp_path / "new", *options)
    assert f"--teacher {DEMO} has 2048 tokens and the model 420" in capsys.readouterr().err


def test_training_ends_when_the_development_rows_are_answered(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is distilled, in parts, with whole chunks among reused ones: all of it at once still learns."""
    options = ["--steps", 200, "--batch-size", 8, "--learning-rate", 0.02, "--warmup-steps", 5, "--decay-share", 0.1]
    options += ["--development", dataset, "--target", 1.0, "--evaluate-steps", 10]
    options += ["--mixed", 0.3, "--max-recomputed", 0]
    options += ["--distill", 0.1, "--accumulate", 2, "--checkpoint-activations", "--device", "cpu"]
    Path(dataset).write_text(json.dumps(SAMPLES[:1]))
    assert finetune(model, "--output", tmp_path / "new", "--dataset", dataset, *options) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert int(last.split()[0]) < 200 and "the target is reached on the development rows" in last


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--dataset"], "2 rows of up to {} tokens: 16 in a step, 16 at a time, learning rate 5e-05"),
        (["--lora-rank", 4, "--dataset"], "learning rate 0.0002"),
        (["--batch-size", 4, "--accumulate", 2, "--learning-rate", 1e-3, "--dataset"], "4 in a step, 2 at a time"),
    ],
)
def test_the_command_says_how_it_trains(
    model: str, dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[Any], expected: str
) -> None:
    if "--lora-rank" in options:
        pytest.importorskip("peft")
    given = [*options, dataset, "--output", tmp_path / "new", "--steps", 1, "--device", "cpu"]
    assert finetune(model, *given) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if "in a step" in line]
    assert re.sub(r"\d+ tokens", "{} tokens", told).startswith("2 rows") and expected in re.sub(
        r"\d+ tokens", "{} tokens", told
    )


def test_texts_are_trained_on(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "mine.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"one {i} two three\n\nfour five six"}) for i in range(3)))
    options = ["--dataset", texts, "--development", texts, "--steps", 1, "--batch-size", 2, "--device", "cpu"]
    assert finetune(model, "--output", tmp_path / "new", *options) == 0
    assert "3 rows of up to" in capsys.readouterr().out and (tmp_path / "new/config.json").exists()


def test_measuring_needs_a_configuration_alone(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.from_pretrained(model).save_pretrained(tmp_path)
    options = ["--max-length", 64, "--batch-size", 2, "--steps", 3, "--distill", 1, "--checkpoint-activations"]
    assert finetune(tmp_path, "--measure-only", "--device", "cpu", *options) == 0
    report = capsys.readouterr().out
    assert "2 prompts of 64 tokens a step, in 1 parts" in report
    assert "tokens/s" in report and "peak memory of this process" in report and "estimated: " in report


def test_memory_is_estimated_before_training(
    model: str, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Activations are computed again where they would take much of it; what cannot fit is refused."""
    config, cpu = AutoConfig.from_pretrained(model), torch.device("cpu")
    plan = TrainingPlan(steps=1, batch_size=4)
    plain, again, halves, single = (
        replace(plan, checkpoint_activations=value, accumulate=parts)
        for value, parts in ((False, 1), (True, 1), (True, 2), (True, 4))
    )
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())
    sizes = [
        measure.estimate(config, one, 256, parameters, parameters, False).total
        for one in (plain, again, halves, single)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] > 16 * parameters
    expected: Any
    for free, expected in (
        (2.1 * sizes[0], plain),
        (1.9 * sizes[0], again),
        (2.1 * sizes[2], halves),
        (1.1 * sizes[3], single),
        (None, plain),
    ):
        monkeypatch.setattr(measure, "available_bytes", lambda free=free: free)
        assert measure.fit_to_memory(config, plan, 256, False, cpu) == expected
    monkeypatch.setattr(measure, "available_bytes", lambda: 1.1 * sizes[1])
    assert measure.fit_to_memory(config, plan, 256, False, cpu, True, 1) == again
    with pytest.raises(ValueError, match="compute fewer than 4 rows at a time"):
        measure.fit_to_memory(config, plan, 256, False, cpu, False, 1)
    monkeypatch.setattr(measure, "available_bytes", lambda: 1000)
    options = ["--output", tmp_path / "new", "--dataset", dataset, "--steps", 1, "--device", "cpu"]
    with pytest.raises(SystemExit):
        finetune(model, *options)
    assert re.search(r"training takes about .* GB are free: shorten rows of \d+ tokens", capsys.readouterr().err)
