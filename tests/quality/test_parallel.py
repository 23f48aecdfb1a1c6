"""A sweep by several processes: what comes out is what one makes of it, and what goes wrong in one is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import context
from tests.quality.small import MODEL, small_samples, write_small
from vllm_blend.pipeline.files import write_json
from vllm_blend.quality.catalogue import SETTINGS
from vllm_blend.quality.parallel import Crew, _receive, make_crew, split_questions, sweep_by
from vllm_blend.quality.questions import read_questions
from vllm_blend.quality.rows import make_rows
from vllm_blend.quality.settings import Setting, find_settings, make_runs
from vllm_blend.quality.sweep import sweep

pytestmark = pytest.mark.cpu_only

TWO = Crew(workers=2, threads=1)
ON_CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


def turned_round(sample: Any, prompt: Any) -> Any:
    return prompt | {"chunks": prompt["chunks"][::-1]}


def fails_on_the_second(sample: Any, prompt: Any) -> Any:
    if sample.sample_id == small_samples(2)[1]["id"]:
        raise ValueError("no such page")
    return prompt


@pytest.mark.usefixtures("forked_workers")
def test_two_workers_measure_what_one_does(tmp_path: Path) -> None:
    """One data set has a sample that does not fit, another but one sample, so that a worker has none of it."""
    samples = small_samples(4)
    samples[1]["ctxs"][0]["text"] = "A lens. " * 600
    data = [
        read_questions(write_json(tmp_path / "musique_long.json", samples)),
        read_questions(write_json(tmp_path / "musique_one.json", small_samples(5)[4:])),
    ]
    runs = make_runs(
        [
            *find_settings(["value_deviation", "gradual"], SETTINGS),
            Setting("turned round", {"blend_selector": "full"}, arrange=turned_round, ratios=(1.0,)),
        ],
        (0.0, 0.2, 1.0),
    )
    said: list[str] = []
    steps = list(sweep_by(TWO, MODEL, data, runs, 2, said.append, **ON_CPU))
    expected = [make_rows(measured, runs) for measured in sweep(MODEL, data, runs, batch=2, **ON_CPU)]
    rows = [make_rows(step, runs) for step in steps]
    assert [len(each) for each in rows] == [len(each) for each in expected] and len(rows) == 2
    for row, other in zip(rows[-1], expected[-1], strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            if name == "encoding":  # each worker encodes the instruction
                assert other[name] <= value <= 1.1 * other[name]
            else:
                close = pytest.approx(other[name], rel=1e-4, abs=1e-6) if isinstance(value, float) else other[name]
                assert value == close, (name, row, other)
    one = steps[0]
    assert [s.sample_id for s in one[0].questions.samples] == [samples[i]["id"] for i in (0, 2, 3)]
    assert one[0].questions.left_out == (samples[1]["id"],)
    assert "engine 2 of 2 is done by 2 workers" in said
    assert any(text.startswith("  the first of 2 workers: value_deviation at 20%") for text in said)


@pytest.mark.usefixtures("forked_workers")
def test_an_error_of_one_worker_ends_the_sweep(tmp_path: Path) -> None:
    wrong = Setting("wrong", {"blend_selector": "full"}, arrange=fails_on_the_second, ratios=(1.0,))
    data = [read_questions(write_small(tmp_path, 2))]
    with pytest.raises(ValueError, match="no such page") as raised:
        list(sweep_by(TWO, MODEL, data, make_runs([wrong], (0.0, 1.0)), 2, print, **ON_CPU))
    assert "in fails_on_the_second" in str(raised.value.__cause__)


def test_a_worker_that_dies_is_an_error() -> None:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=os._exit, args=(3,))
    process.start()
    theirs.close()
    with pytest.raises(RuntimeError, match=r"exit code 3.*use fewer workers"):
        _receive(ours, process)


def test_each_worker_has_as_many_of_each_kind(tmp_path: Path) -> None:
    samples = [raw | {"id": f"s{i}", "kind": "abc"[i % 3]} for i, raw in enumerate(small_samples(1) * 18)]
    questions = read_questions(write_json(tmp_path / "musique.json", samples))
    shares = split_questions(questions, 3)
    assert sorted(index for share in shares for index in share) == list(range(18))
    for share in shares:
        assert share == sorted(share)
        assert sorted(questions.samples[index].kind or "" for index in share) == ["a", "a", "b", "b", "c", "c"]
    assert [len(share) for share in split_questions(questions, 4)] == [5, 5, 4, 4]


def test_a_crew_shares_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [read_questions(write_small(tmp_path, 3))]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert make_crew(None, "cpu", data) == Crew(3, 4)  # not more than questions
    assert make_crew(None, "cpu", [*data, *data], by_list=True) == Crew(2, 5)  # not more than lists
    assert make_crew(2, "cpu", data) == Crew(2, 5) and make_crew(1, "cpu", data) == Crew(1, 5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make_crew(None, "cuda", data) == Crew(1, 5)
    with pytest.raises(ValueError, match="use 1 or more"):
        make_crew(0, "cpu", data)
