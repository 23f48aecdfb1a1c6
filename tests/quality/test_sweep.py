"""A sweep: what is measured once, what is compared with what, and the numbers that come out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quality.small import MODEL, small_samples, write_small
from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, normalize_sample
from vllm_blend.pipeline.evaluate import score_prediction
from vllm_blend.pipeline.files import write_json
from vllm_blend.quality.catalogue import SETTINGS
from vllm_blend.quality.questions import read_questions
from vllm_blend.quality.rows import make_rows, shortened
from vllm_blend.quality.session import Session
from vllm_blend.quality.settings import Run, Setting, find_settings, make_runs
from vllm_blend.quality.sweep import Measured, kl_divergence, sweep

RATIOS = (0.0, 0.2, 1.0)


def turned_round(sample: Any, prompt: Any) -> Any:
    return prompt | {"chunks": prompt["chunks"][::-1]}


RUNS = make_runs(
    [
        *find_settings(["value_deviation", "gradual"], SETTINGS),
        Setting("turned round", {"blend_selector": "full"}, arrange=turned_round, ratios=(1.0,)),
    ],
    RATIOS,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def measured(data: Path) -> list[Measured]:
    counts = []
    for step in sweep(MODEL, [read_questions(data)], RUNS, batch=2):
        counts.append([len(one.runs) for one in step])
    assert counts == [[4], [5]]  # gradual filtering has an engine of its own
    return step


def run_of(setting: str, ratio: float) -> Run:
    return next(run for run in RUNS if (run.setting.name, run.ratio) == (setting, ratio))


def test_scores_are_those_of_the_llms_answers(measured: list[Measured]) -> None:
    llm = LLM(MODEL, enable_blending=True)
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    samples = [normalize_sample(raw) for raw in small_samples()]
    for selector, ratio, outcome in (
        ("none", None, measured[0].runs[run_of("plain reuse", 0.0).key]),
        ("value_deviation", 0.2, measured[0].runs[run_of("value_deviation", 0.2).key]),
        ("full", None, measured[0].full),
    ):
        settings: Any = {"blend_selector": selector} | ({} if ratio is None else {"blend_recompute_ratio": ratio})
        prompts = [build_qa_prompt(sample, "musique") | settings for sample in samples]
        texts = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        scores = [score_prediction(text, list(s.answers)) for text, s in zip(texts, samples, strict=True)]
        assert outcome.f1 == [score.f1 for score in scores]
        assert outcome.exact_match == [score.exact_match for score in scores]
        assert outcome.rouge_l == [score.rouge_l for score in scores]


def test_everything_recomputed_is_full_prefill(measured: list[Measured]) -> None:
    [one] = measured
    outcome = one.runs[run_of("recompute all", 1.0).key]
    assert outcome.same_answer == [1.0] * 3 and max(outcome.kl) < 1e-6
    assert outcome.f1 == one.full.f1 and outcome.token_layers < one.full.token_layers
    assert one.full.kl == [0.0] * 3 and one.full.same_answer == [1.0] * 3
    assert one.runs[run_of("gradual", 1.0).key] is outcome


def test_what_is_arranged_by_a_setting_is_what_is_asked(measured: list[Measured]) -> None:
    outcome = measured[0].runs[run_of("turned round", 1.0).key]
    assert max(outcome.kl) > 1e-4  # the passages stand in another order than for full prefill


def test_chunks_are_encoded_once_an_engine(measured: list[Measured]) -> None:
    runs = measured[0].runs
    encoded = {setting: runs[run_of(setting, ratio).key].encoding for setting, ratio in (("plain reuse", 0.0),)}
    assert encoded["plain reuse"] > 0
    assert runs[run_of("value_deviation", 0.2).key].encoding == runs[run_of("recompute all", 1.0).key].encoding == 0
    assert runs[run_of("gradual", 0.2).key].encoding == pytest.approx(encoded["plain reuse"])


def test_rows_of_the_sweep(measured: list[Measured]) -> None:
    rows = make_rows(measured, RUNS, seed=0)
    kinds = {"all", "1hop", "cross", "2hop"}
    assert {row["kind"] for row in rows} == kinds and len(rows) == 4 * (1 + len(RUNS))
    by_name = {(r["setting"], r["ratio"]): r for r in rows if r["kind"] == "all"}
    reuse, deviation = by_name["plain reuse", 0.0], by_name["value_deviation", 0.2]
    assert by_name["full prefill", None]["token_layers"] == 1
    assert 0 < reuse["token_layers"] < deviation["token_layers"] < by_name["recompute all", 1.0]["token_layers"] < 1
    assert by_name["value_deviation", 0.0]["same_as"] == by_name["gradual", 0.0]["same_as"] == "plain reuse"
    assert deviation["same_as"] is None and deviation["over_cacheblend"] == 0
    assert reuse["encoding"] == deviation["encoding"] > 0.5
    assert by_name["gradual", 0.2]["encoding"] == pytest.approx(reuse["encoding"])
    assert make_rows(measured, RUNS, seed=0) == rows


def test_what_is_not_finite_is_no_number_in_the_file(measured: list[Measured], tmp_path: Path) -> None:
    broken = replace(measured[0].full, kl=[float("nan")] * len(measured[0].full.kl))
    rows = make_rows([replace(measured[0], full=broken)], RUNS, seed=0)
    assert (rows[0]["kl"], rows[0]["kl_low"], rows[0]["kl_high"]) == (None, None, None) and rows[0]["f1"] is not None
    text = write_json(tmp_path / "q.json", {"rows": shortened(rows)}).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["rows"][0]["kl"] is None


def test_a_kind_called_all_is_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "musique.json", [sample | {"kind": "all"} for sample in small_samples(1)])
    with pytest.raises(ValueError, match="the kind 'all' stands for all questions"):
        read_questions(path)


def test_samples_that_do_not_fit_are_left_out_of_every_run(tmp_path: Path) -> None:
    samples = small_samples(2)
    samples[0]["ctxs"][0]["text"] = "A lens. " * 600
    questions = read_questions(write_json(tmp_path / "musique.json", samples))
    [one], *_ = sweep(MODEL, [questions], make_runs([], (0.0,)), batch=2)
    assert one.questions.left_out == (samples[0]["id"],) and len(one.full.f1) == 1
    with pytest.raises(ValueError, match="none of the 1 samples of musique fits the model's 1024 tokens"):
        next(sweep(MODEL, [read_questions(tmp_path / "musique.json", limit=1)], make_runs([], (0.0,))))


def test_questions_are_equally_many_of_each_kind(tmp_path: Path) -> None:
    samples = [
        raw | {"id": f"s{i}", "kind": "rare" if i == 8 else "common"} for i, raw in enumerate(small_samples() * 3)
    ]
    path = write_json(tmp_path / "musique.json", samples)
    assert [s.sample_id for s in read_questions(path, limit=4).samples] == ["s0", "s8", "s1", "s2"]
    assert read_questions(path, limit=1).kinds == [] and read_questions(path).kinds == ["common", "rare"]
    assert read_questions(write_json(tmp_path / "other.json", samples), "samsum").style.metric == "rouge_l"
    for arguments, message in (
        ((tmp_path / "other.json",), "rename the file, or name the style"),
        ((path, "hotpot"), "'hotpot' is unknown: use one of musique"),
        ((path, None, 0), "use 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            read_questions(*arguments)


def test_kl_divergence_of_distributions() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    assert kl_divergence(p, q) == pytest.approx(0.25 * torch.log(torch.tensor(2.0)).item())
    assert kl_divergence(p, p) == 0
    assert kl_divergence(p, torch.full((3,), torch.nan)) != kl_divergence(p, torch.full((3,), torch.nan))


def test_the_memory_of_a_session_is_given_back(data: Path) -> None:
    with Session(MODEL, batch=1) as session:
        pass
    assert not hasattr(session, "engine")
