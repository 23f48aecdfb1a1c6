"""The comparison: every method answers every prompt in its own way, and the table says what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare as module
from tests.pipeline.stages import MODEL, ROOT, Stages, demo_samples
from vllm_blend import LLM, SamplingParams
from vllm_blend.engine_args import EngineArgs
from vllm_blend.pipeline import build_qa_prompt, normalize_sample
from vllm_blend.pipeline.files import read_json

NAMES = [method.name for method in module.make_methods(0.15)]


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    stages = Stages.over(tmp_path_factory.mktemp("compare"), demo_samples(3))
    stages.build(max_samples=2)  # the third sample's chunks are computed by the comparison
    flags = ["--dataset", str(stages.root / "musique_t.json"), "--model-id", MODEL, "--long-prompts", "1"]
    flags += ["--long-tokens", "700", "--load-cache-dir", str(stages.chunks), "--output", str(stages.root / "c.json")]
    module.main(flags)
    return stages


@pytest.fixture(scope="module")
def output(stages: Stages) -> dict[str, Any]:
    written: dict[str, Any] = read_json(stages.root / "c.json", "comparison")
    return written


def test_chunks_are_loaded_where_stage_2_left_them(output: dict[str, Any]) -> None:
    samples = [len(sample["ctxs"]) for sample in demo_samples(3)]
    assert output["chunks"]["loaded"] == sum(samples[:2]) + 1
    assert output["chunks"]["missing"] == samples[2]


def test_every_method_answers_the_same_prompts(output: dict[str, Any]) -> None:
    assert [row["method"] for row in output["rows"]] == list(output["answers"]) == NAMES
    assert [row["prompts"] for row in output["rows"]] == [3] * 4
    assert len({row["prompt_tokens"] for row in output["rows"]}) == 1
    full, reuse, attention, deviation = (row["recomputed_share"] for row in output["rows"])
    assert full == 1.0 and 0 < reuse < 0.1
    assert attention == deviation and 0.15 < attention - reuse + 0.01 < 0.17  # 15% and the question
    for row in output["rows"]:
        answers = output["answers"][row["method"]]
        assert row["f1"] == pytest.approx(sum(answer["f1"] for answer in answers) / 3)
        assert row["exact_match"] == pytest.approx(sum(answer["exact_match"] for answer in answers) / 3)


def test_the_answers_are_those_of_the_llm(output: dict[str, Any]) -> None:
    llm = LLM(MODEL, enable_blending=True, blend_encoding_context="prefix")
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    for name, selector in ((NAMES[0], "full"), (NAMES[1], "none")):
        prompts = [build_qa_prompt(normalize_sample(raw), "musique") for raw in demo_samples(3)]
        texts = [
            llm.generate({**prompt, "blend_selector": selector}, params, use_tqdm=False)[0].outputs[0].text
            for prompt in prompts
        ]
        assert texts == [answer["prediction"] for answer in output["answers"][name]]


def test_the_default_rule_is_compared_and_every_blend_knows_the_pages() -> None:
    default = EngineArgs(model=MODEL, enable_blending=True).create_engine_config().blend.selector
    assert [method.selector for method in module.make_methods(0.15)].count(default) == 1
    pieces: Any = {"prefix": "p", "chunks": ["a", "b"], "suffix": "s", "continues": [None, 0]}
    for method in module.make_methods(0.15)[1:]:
        prompt: Any = method.prompt(pieces)
        assert prompt["continues"] == [None, 0] and prompt["blend_selector"] == method.selector
    assert set(pieces) == {"prefix", "chunks", "suffix", "continues"}


def test_long_prompts_are_as_long_as_asked(output: dict[str, Any]) -> None:
    [tokens] = {row["prompt_tokens"] for row in output["long_rows"]}
    assert 600 < tokens <= 700 and all(row["prompts"] == 1 and "f1" not in row for row in output["long_rows"])


def test_a_sample_that_is_too_long_is_left_out_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    samples = demo_samples(2)
    samples[0]["ctxs"][0]["text"] = "A lens. " * 600
    stages = Stages.over(tmp_path, samples)
    flags = ["--dataset", str(tmp_path / "musique_t.json"), "--model-id", MODEL, "--long-prompts", "0"]
    flags += ["--load-cache-dir", str(stages.chunks), "--output", str(tmp_path / "c.json")]
    module.main(flags)
    assert "does not blend" not in caplog.text  # full prefill is asked for, not a mistake
    assert "1 questions" in (out := capsys.readouterr().out) and "1 left out as too long" in out
    output = read_json(tmp_path / "c.json", "comparison")
    assert output["left_out"] == ["musique_s-000"] and [row["prompts"] for row in output["rows"]] == [1] * 4
    with pytest.raises(SystemExit):
        module.main([*flags, "--max-samples", "1"])
    assert "none of the 1 samples fits the model's 1024 tokens" in capsys.readouterr().err


def test_rows_say_what_was_measured() -> None:
    methods = module.make_methods(0.15)[:2]
    methods[0].ttft, methods[1].ttft = [0.2, 0.1, 0.9], [0.05, 0.04, 0.06]
    methods[0].latency, methods[1].latency = [0.3, 0.2, 1.0], [0.06, 0.05, 0.07]
    for method in methods:
        method.prompt_tokens, method.recomputed_tokens = 300, 30
        method.answers = [{"f1": 0.5, "exact_match": 0.0, "rouge_l": 1.0}] * 3
    rows = module.make_rows(methods)
    assert (rows[1]["ttft_median_s"], rows[1]["ttft_speedup"], rows[1]["recomputed_share"]) == (0.05, 4.0, 0.1)
    # Of three prompts, one is drawn three times more often than the interval leaves out.
    assert (rows[1]["ttft_speedup_low"], rows[1]["ttft_speedup_high"]) == pytest.approx((0.1 / 0.04, 0.9 / 0.06))
    assert rows[1]["ttft_s"] == [0.05, 0.04, 0.06] and rows[0]["ttft_speedup_low"] == rows[0]["ttft_speedup_high"] == 1
    lines = module.render_table(rows, "f1").splitlines()
    assert lines[0].split("|")[2:4] == ["   F1 ", " exact match "]
    assert " ".join(lines[3].split()) == "| plain reuse | 50.0 | 0.0 | 50.0 ms (4.0x, 2.5 to 15.0) | 60.0 ms | 10.0 |"
    assert "Rouge-L" in module.render_table(rows, "rouge_l")


def test_mistakes_end_the_command_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--dataset", str(tmp_path / "musique.json")], "not found"),
        (["--dataset", str(ROOT / "inputs/musique_s.json"), "--model-id", str(tmp_path / "m")], str(tmp_path / "m")),
    ):
        with pytest.raises(SystemExit) as ended:
            module.main(flags)
        assert ended.value.code == 1 and message in capsys.readouterr().err
