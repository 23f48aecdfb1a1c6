"""`vllm-blend check-model`: its verdicts, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.quality.broken import StepPositions
from tests.quality.small import MODEL, ROOT, small_samples, write_small
from vllm_blend.command_line import BAD_INPUT
from vllm_blend.config import BlendConfig
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.entrypoints import cli
from vllm_blend.models.registry import MODEL_REGISTRY
from vllm_blend.pipeline.files import read_json, write_json
from vllm_blend.quality import check_model as module
from vllm_blend.quality import sweep
from vllm_blend.quality.check_model import (
    FOUND,
    NOT_TO_BLEND,
    UNCERTAIN,
    Verdict,
    decide,
    default_settings,
    summarize,
)
from vllm_blend.quality.intervals import SmallSampleIntervals
from vllm_blend.quality.questions import Questions
from vllm_blend.quality.rows import estimate_columns
from vllm_blend.quality.settings import Run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


def row(ratio: float | None, f1: float, kind: str = "all", **columns: Any) -> dict[str, Any]:
    setting = "full prefill" if ratio is None else "rule"
    values = {"dataset": "d", "kind": kind, "setting": setting, "ratio": ratio, "samples": 9, "metric": "f1", "f1": f1}
    return values | {"kept": f1 / 0.8, "kept_low": None, "kept_high": None, "token_layers": 0.2} | columns


FULL = row(None, 0.8)
FEW = ["--min-questions", "1"]


@pytest.mark.parametrize(
    ("scores", "ratio"),
    [
        ({0.0: 0.3, 0.1: 0.77, 0.2: 0.79, 1.0: 0.8}, 0.1),
        ({0.0: 0.3, 0.1: 0.77, 0.2: 0.6, 0.3: 0.8, 1.0: 0.8}, 0.3),  # 10% was luck
        ({0.0: 0.78, 0.1: 0.8, 1.0: 0.8}, 0.0),
        ({0.0: 0.3, 0.1: 0.5, 0.2: 0.75, 1.0: 0.8}, None),  # 1 alone is no blend
    ],
)
def test_the_smallest_ratio_from_which_on_the_loss_is_small(scores: dict[float, float], ratio: float | None) -> None:
    verdict = decide([FULL, *(row(r, f1) for r, f1 in scores.items())], "rule", max_loss=0.05)
    assert verdict.ratio == ratio
    assert ("do not blend this model so" in verdict.text) is (ratio is None)


def test_a_verdict_says_what_it_rests_on() -> None:
    rows = [FULL, row(0.1, 0.78, kept_low=0.9, kept_high=1.02), row(0.1, 0.4, kind="2hop"), row(1.0, 0.8)]
    verdict = decide(rows, "rule", 0.05)
    text = verdict.text
    assert "d, rule: 10% may be enough, but more questions are needed to say so: it loses 2.5% (95%" in text
    assert "2.5% (95% interval -2.0 to 10.0%)" in text
    assert "of full prefill's F1 over 9 questions and computes 20.0% of its token-layers" in text
    assert "a loss of more than 5% is not ruled out: ask about 100 questions" in text  # 9 * (7.5 / 2.5) ** 2 is 81
    assert "of the kind '2hop' alone it loses 50.0%" in text
    assert (verdict.certain, verdict.status, verdict.token_layers) == (False, UNCERTAIN, 0.2)
    wide = decide([FULL, row(0.1, 0.78, kept_low=-37.0, kept_high=1.02), row(1.0, 0.8)], "rule", 0.05).text
    assert "it loses 2.5% (of so few questions that any loss is possible)" in wide


def test_only_an_interval_within_the_loss_is_certain() -> None:
    for low, certain in ((0.96, True), (0.94, False), (None, False)):
        verdict = decide([FULL, row(0.1, 0.79, kept_low=low, kept_high=1.02), row(1.0, 0.8)], "rule", 0.05)
        assert verdict.ratio == 0.1 and verdict.certain is certain
        assert ("d, rule: 10% is enough: it loses" in verdict.text) is certain
        assert ("is not ruled out" in verdict.text) is not certain


def test_a_larger_ratio_that_is_certain_goes_before_a_smaller_one_that_is_not() -> None:
    """This was seen: "0% is enough", of few questions and with a wide interval."""
    rows = [FULL, row(0.0, 0.792, kept_low=0.9, kept_high=1.1), row(0.1, 0.8, kept_low=0.97, kept_high=1.0)]
    verdict = decide([*rows, row(1.0, 0.8)], "rule", 0.05)
    assert (verdict.ratio, verdict.certain) == (0.1, True)
    assert "0% may be enough too: it loses 1.0% (95% interval -10.0 to 10.0%); ask about 50 questions" in verdict.text


def test_a_loss_that_may_be_within_is_no_certain_refusal() -> None:
    for high, certain in ((0.9, True), (0.97, False)):
        text = decide([FULL, row(0.1, 0.7, kept_low=0.7, kept_high=high)], "rule", 0.05).text
        assert "do not blend this model so: at 10% recomputed it still loses 12.5% (95% interval" in text
        assert ("do not rule out that it is within" in text) is not certain


def test_the_cheapest_of_the_rules_that_are_enough_is_named() -> None:
    verdicts = [
        Verdict("a", "dear", 0.1, "", True, 0.3),
        Verdict("b", "dear", 0.2, "", True, 0.4),
        Verdict("a", "cheap", 0.2, "", True, 0.25),
        Verdict("b", "cheap", 0.3, "", True, 0.35),
        Verdict("a", "unsure", 0.0, "", False, 0.1),
        Verdict("b", "unsure", 0.0, "", True, 0.1),
    ]
    assert summarize(verdicts) == [
        "for all of them, dear: blend_recompute_ratio=0.2",
        "for all of them, cheap: blend_recompute_ratio=0.3",
        "for all of them, unsure: blend_recompute_ratio=0",
        "of those that are enough, cheap costs least: 30.0% of the token-layers",
    ]
    assert summarize(verdicts[:1]) == []


def test_the_rule_that_the_default_falls_back_on_is_compared() -> None:
    assert [setting.name for setting in default_settings()] == ["the default rule", "question_attention"]
    assert BlendConfig().selector == "relevant_passages"


def test_equal_scores_are_no_certainty() -> None:
    """This was seen: full prefill and blend answered one question alike, and the verdict had no doubt."""
    for count, certain in ((1, False), (50, False), (80, True)):
        full = np.ones(count)
        kept: dict[str, Any] = estimate_columns("kept", SmallSampleIntervals(count, 0).ratio(full, full))
        verdict = decide([FULL, row(0.1, 0.8, **kept), row(1.0, 0.8)], "rule", 0.05)
        assert verdict.certain is certain, count


@pytest.mark.parametrize(("flags", "count"), [([], 3), (["--samples", "1"], 1), (["--min-questions", "4"], 3)])
def test_fewer_questions_than_a_verdict_takes_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str], flags: list[str], count: int
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main([str(data), "--dataset", str(data), *flags])  # no model is loaded for that
    said = capsys.readouterr().err
    assert ended.value.code == BAD_INPUT and f"musique_small has {count} question" in said
    assert f"give at least {flags[-1] if '--min-questions' in flags else 50}" in said
    assert f"allow fewer with --min-questions {count}" in said


def test_questions_that_the_model_cannot_hold_do_not_count(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_the_last(questions: Questions, engine: LLMEngine, whole: bool) -> Questions:
        return replace(questions, samples=questions.samples[:-1], left_out=("the last",))

    monkeypatch.setattr(sweep, "select_fitting", without_the_last)
    with pytest.raises(SystemExit) as ended:
        module.main([MODEL, "--dataset", str(data), "--min-questions", "3"])
    said = capsys.readouterr().err
    assert ended.value.code == BAD_INPUT and "has 2 questions that can be asked, too few" in said


def test_a_model_that_cannot_answer_cannot_be_judged() -> None:
    verdict = decide([row(None, 0.05), row(0.0, 0.05), row(1.0, 0.05)], "rule", 0.05)
    assert verdict.ratio is None and "cannot tell: full prefill itself has F1 5.0" in verdict.text


def test_the_command_prints_the_ratio_and_writes_the_rows(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [MODEL, "--dataset", str(data), *FEW, "--ratios", "0", "0.9", "1", "--batch", "4", "--max-loss", "0.01"]
    flags += ["--selector", "question_attention", "random"]
    assert cli.main(["check-model", *flags, "--output", str(tmp_path / "c.json")]) == UNCERTAIN  # of three questions
    out = capsys.readouterr().out
    written = read_json(tmp_path / "c.json", "rows")
    assert [verdict["text"] in out for verdict in written["verdicts"]] == [True, True]
    assert [verdict["setting"] for verdict in written["verdicts"]] == ["question_attention", "random"]
    assert written["verdicts"][0]["ratio"] in (0.0, 0.9)
    assert "| random | 90% |" in out and "everything recomputed, against full prefill: KL" in out
    [heads] = [line for line in out.splitlines() if line.startswith("| setting | ratio |")]
    for head in heads.strip("| ").split(" | "):  # what the reader of the table cannot guess is explained below it
        assert head in ("setting", "exact match") or head.startswith("F1") or f"`{head}`:" in out, head


def test_a_rule_that_keeps_too_little_is_no_way_to_blend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [MODEL, "--dataset", str(write_small(tmp_path, 6)), *FEW, "--ratios", "0", "0.02", "--setting", "random"]
    assert module.main([*flags, "--batch", "6", "--max-loss", "0"]) == NOT_TO_BLEND
    out = capsys.readouterr().out
    assert "do not blend this model so: at 2% recomputed it still loses 16.7%" in out and "| random | 2% |" in out


def test_a_broken_model_is_refused_with_a_reason(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODEL_REGISTRY, "LlamaForCausalLM", StepPositions)
    flags = ["--batch", "4", *FEW, "--output", str(tmp_path / "c.json")]
    assert module.main([MODEL, "--dataset", str(data), *flags]) == NOT_TO_BLEND
    out = capsys.readouterr().out
    assert out.startswith("Refused: do not blend this model.") and "positions that count from the step's first" in out
    assert "is enough" not in out and "| full prefill |" not in out
    for verdict in read_json(tmp_path / "c.json", "verdicts")["verdicts"]:
        assert verdict["ratio"] is None and "positions that count from the step's first" in verdict["text"]


def test_a_lever_is_tried_at_the_ratios_asked_for(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep's own ratios for it are others."""
    runs: list[Run] = []

    def measured_nothing(model: str, data: Any, wanted: list[Run], *args: Any, **more: Any) -> Any:
        runs.extend(wanted)
        return [[]]

    monkeypatch.setattr(module, "sweep", measured_nothing)
    monkeypatch.setattr(module, "_report", lambda *args: [Verdict("d", "question_attention+mean_shift", 0.4, "", True)])
    flags = [MODEL, "--dataset", str(data), *FEW, "--setting", "question_attention+mean_shift"]
    assert module.main([*flags, "--ratios", "0", "0.4", "0.6"]) == FOUND
    assert [run.ratio for run in runs if "mean_shift" in run.setting.name] == [0, 0.4, 0.6]


def test_what_memory_does_not_hold_is_no_verdict(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crowded(*args: Any) -> None:
        raise RuntimeError("the KV cache has no room for 16 prompts at a time")

    monkeypatch.setattr(module, "check_exactness", crowded)
    with pytest.raises(SystemExit) as ended:
        module.main([MODEL, "--dataset", str(data), *FEW])
    assert ended.value.code == BAD_INPUT and "no room for 16 prompts" in capsys.readouterr().err


def test_two_data_sets_of_one_name_are_refused(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_small(tmp_path)
    with pytest.raises(SystemExit) as ended:
        module.main([MODEL, "--dataset", str(data), str(other)])
    assert ended.value.code == BAD_INPUT and "two data sets are called 'musique_small'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-loss", "5"], "--max-loss 5.0 is a share"),
        (["--ratios", "0", "1"], "must include one between 0 and 1"),
        (["--ratios", "0.5"], "must include 0"),
        (["--setting", "randm"], "'randm' is unknown"),
        (["--samples", "0"], "use 1 or more"),
        (["--batch", "0"], "batch is 0"),
        (["--min-questions", "0"], "--min-questions 0 must be at least 1"),
        (["--seed", "-1"], "--seed is -1: use 0 or more"),
        (["--dataset", "no/musique.json"], "not found"),
        (["--style", "hotpot"], "'hotpot' is unknown"),
        (["--output", str(ROOT / "pyproject.toml" / "c.json")], "is a file, not a folder"),
        (["--output", str(ROOT / "tests")], "tests is a folder: give a file"),
    ],
)
def test_bad_input_ends_with_a_message(
    data: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main([MODEL, "--dataset", str(data), *FEW, *flags])
    assert ended.value.code == BAD_INPUT and message in capsys.readouterr().err


def test_a_missing_model_and_a_sample_without_a_question_are_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_json(tmp_path / "musique.json", [small_samples(1)[0] | {"question": ""}])
    for flags, message in (
        ([str(tmp_path / "none"), "--dataset", str(data), *FEW], str(tmp_path / "none")),
        ([MODEL, "--dataset", str(broken)], "sample 0: question must be a non-empty string"),
    ):
        with pytest.raises(SystemExit) as ended:
            module.main(flags)
        assert ended.value.code == BAD_INPUT and message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_before_its_style(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        module.main(["inputs/demo-model", "--dataset", "no_such_file.jsonl"])
    assert "no_such_file.jsonl" in (said := capsys.readouterr().err) and "style" not in said
