"""Measures of a data set are those of its questions one by one, however they are put into batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.quality.small import MODEL, small_samples, write_small
from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, normalize_sample
from vllm_blend.pipeline.ask import choose_asking
from vllm_blend.pipeline.evaluate import score_prediction
from vllm_blend.quality.measures import LISTS, Measured, measure, total_work
from vllm_blend.quality.questions import Questions, joined_ids, read_questions, select_fitting
from vllm_blend.quality.session import Session
from vllm_blend.quality.settings import Setting
from vllm_blend.quality.table import columns_of, make_rows, render

SETTINGS = [Setting("none", 0.0, "page"), Setting("random", 0.2, "page"), Setting("random", 0.2, "filler")]
COUNT = 5


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(MODEL, batch=4) as session:
        yield session


@pytest.fixture(scope="module")
def questions(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Questions:
    path = write_small(tmp_path_factory.mktemp("data"), COUNT)
    return replace(read_questions(path), asking=choose_asking(session.engine.tokenizer, path))


@pytest.fixture(scope="module")
def measured(session: Session, questions: Questions) -> Measured:
    done: list[float] = []
    found = measure(session, questions, SETTINGS, done.append)
    tokens = sum(len(joined_ids(session.engine, questions.prompt(sample))) for sample in questions.samples)
    assert sum(done) == pytest.approx(total_work(tokens, SETTINGS))  # the bar ends where it should
    return found


def test_answers_and_scores_are_those_of_the_llm(measured: Measured) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    for setting, measures in measured.settings.items():
        llm = LLM(MODEL, enable_blending=True, blend_encoding_context=setting.company)
        for index, raw in enumerate(small_samples(COUNT)):
            sample = normalize_sample(raw)
            prompt = build_qa_prompt(sample, "musique")
            asked: list[Any] = [{"prompt_token_ids": joined_ids(llm.llm_engine, prompt)}, prompt | setting.prompt]
            full, blended = llm.generate(asked, params, use_tqdm=False)
            answer = blended.outputs[0]
            assert measures.texts[index] == answer.text.strip()
            assert measures.agreement[index] == (answer.token_ids == full.outputs[0].token_ids)
            scores = score_prediction(answer.text, list(sample.answers))
            assert (measures.f1[index], measures.exact_match[index]) == (scores.f1, scores.exact_match)
    assert len({tuple(measures.kl) for measures in measured.settings.values()}) == len(SETTINGS)


def test_batches_change_nothing(session: Session, questions: Questions, measured: Measured) -> None:
    session.batch = 2
    again = measure(session, questions, SETTINGS, lambda done: None)
    session.batch = 4
    for setting, measures in measured.settings.items():
        for name in LISTS:
            assert again.settings[setting].values(name) == pytest.approx(measures.values(name), rel=1e-3, abs=1e-6)
        assert again.settings[setting].work == pytest.approx(measures.work)
    assert again.full.work == pytest.approx(measured.full.work)


def test_full_prefill_in_other_batches_is_the_noise_floor(measured: Measured) -> None:
    assert measured.again.texts == measured.full.texts and measured.again.agreement == [1.0] * COUNT
    assert max(measured.again.kl) < 1e-6 < max(measured.settings[SETTINGS[0]].kl)
    assert measured.again.work == pytest.approx(measured.full.work)


def test_rows_say_what_was_measured(measured: Measured) -> None:
    rows = make_rows(measured, over=SETTINGS[1])
    assert [row["setting"] for row in rows] == [
        "full prefill",
        "full prefill, other batches",
        "none (page)",
        "random 20% (page)",
        "random 20% (filler)",
    ]
    reuse, own = rows[2], measured.settings[SETTINGS[0]]
    assert reuse["kl"] == pytest.approx(own.values("kl").mean(), rel=1e-4) and reuse["rule"] == "none"
    assert reuse["f1_gain"] == pytest.approx(own.values("f1").mean() - measured.full.values("f1").mean(), rel=1e-4)
    assert reuse["agreement_low"] < reuse["agreement"] < reuse["agreement_high"]
    assert reuse["kl_over"] == pytest.approx(reuse["kl"] - rows[3]["kl"], rel=1e-3) and rows[3]["kl_over"] == 0
    assert 0 < reuse["work"] < rows[3]["work"] < 1 == rows[0]["work"]
    assert reuse["encoding"] == rows[3]["encoding"] < rows[4]["encoding"]  # the fillers take work, too
    text = render(rows).splitlines()
    assert len(text) == 7 and text[0].endswith("| KL, difference |") and text[4].startswith("| none (page) | ")
    columns = columns_of(measured)
    assert columns["none (page)"]["text"] == own.texts and len(columns["id"]) == COUNT


def test_numbers_that_are_none_stay_readable(measured: Measured) -> None:
    damaged = replace(measured, again=replace(measured.again, kl=[float("nan")] * COUNT))
    row = make_rows(damaged)[1]
    assert row["kl"] is None and "? (? to ?)" in render([row])
    assert columns_of(damaged)["full prefill, other batches"]["kl"] == [None] * COUNT


def test_questions_are_drawn_by_a_seed(tmp_path: Path) -> None:
    path = write_small(tmp_path, 9)
    ids = [[s.sample_id for s in read_questions(path, 4, seed).samples] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2] and all(own == sorted(own) and len(own) == 4 for own in ids)
    assert len(read_questions(path, 20).samples) == 9
    with pytest.raises(ValueError, match="questions is 0"):
        read_questions(path, 0)


def test_what_the_model_cannot_hold_is_left_out(session: Session, questions: Questions) -> None:
    long = replace(questions.samples[1], passages=questions.samples[1].passages * 12)
    found = select_fitting(replace(questions, samples=(questions.samples[0], long)), session.engine)
    assert found.samples == questions.samples[:1] and found.left_out == (long.sample_id,)
    with pytest.raises(ValueError, match="none of the 1 samples of musique_small fits the model's 1024 tokens"):
        select_fitting(replace(questions, samples=(long,)), session.engine)
