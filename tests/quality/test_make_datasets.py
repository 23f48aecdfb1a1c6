"""Questions about new worlds: of one split, in the pipeline's format, with their world."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vllm_blend.pipeline.datasets import normalize_sample
from vllm_blend.quality import bm25_hits
from vllm_blend.quality.make_datasets import KINDS, main, make_samples
from vllm_blend.quality.questions import read_questions
from vllm_blend.quality.splits import DEVELOPMENT, TEST, TRAINING


def test_a_file_of_new_worlds_is_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--families", "4", "--style", "wild", "--samples", "20", "--per-world", "3"]
    main(["--split", "development", *asked, "--output-dir", str(tmp_path)])
    path = tmp_path / "musique_development_wild_4.json"
    assert capsys.readouterr().out == f"20 questions about 7 worlds: {path}\n"
    questions = read_questions(path)
    assert questions.style.name == "musique" and len(questions.samples) == 20
    assert [sum(sample.kind == kind for sample in questions.samples) for kind in KINDS] == [7, 7, 6]
    for sample in questions.samples:
        assert sample.gold and sample.answers[0] in " ".join(sample.passages[i].text for i in sample.gold)
    bm25_hits.main([str(path)])
    assert "20 questions of 20" in capsys.readouterr().out


def test_questions_about_a_world_differ_and_name_it() -> None:
    made = make_samples(DEVELOPMENT, 8, "plain", 45, per_world=15)
    worlds: dict[str, list[dict[str, Any]]] = {}
    for sample in made:
        worlds.setdefault(sample["world"], []).append(sample)
    assert [len(questions) for questions in worlds.values()] == [15, 15, 15]
    for world, questions in worlds.items():
        assert int(world) in DEVELOPMENT.seeds
        assert len({question["question"] for question in questions}) == 15
        assert all(question["ctxs"] == questions[0]["ctxs"] for question in questions)
    assert len({sample["id"] for sample in made}) == 45
    assert all(normalize_sample(sample).kind == KINDS[index % 3] for index, sample in enumerate(made))


def test_kinds_take_turns_over_worlds_and_small_worlds_may_lack_some() -> None:
    made = make_samples(DEVELOPMENT, 4, "plain", 9, per_world=2)
    assert [sample["kind"] for sample in made] == [KINDS[index % 3] for index in range(9)]
    small = make_samples(DEVELOPMENT, 1, "wild", 60, per_world=15)
    assert len({(sample["world"], sample["question"]) for sample in small}) == 60
    assert {sample["kind"] for sample in small} == set(KINDS)


def test_every_size_and_style_has_worlds_of_its_own() -> None:
    seeds = [
        int(make_samples(split, families, style, 1)[0]["world"])
        for split in (DEVELOPMENT, TEST)
        for style in ("plain", "wild")
        for families in range(1, 9)
    ]
    ordered = sorted(seeds)
    assert all(after - before >= 50_000 for before, after in pairwise(ordered))
    assert ordered[0] >= DEVELOPMENT.first + 50_000 and ordered[-1] + 50_000 <= TEST.seeds.stop
    assert sum(seed in DEVELOPMENT.seeds and seed + 49_999 in DEVELOPMENT.seeds for seed in seeds) == 16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"split": TRAINING}, "models are trained on the training split"),
        ({"families": 9}, "the number of families is 9: use 1 to 8"),
        ({"style": "tame"}, "style 'tame' are unknown: use one of plain, wild"),
        ({"per_world": 16}, "questions per world is 16: use 1 to 15"),
        ({"samples": 50_001}, "number of samples is 50001: use 1 to 50000"),
        ({"samples": 0}, "number of samples is 0"),
    ],
)
def test_what_can_not_be_made_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_samples(**{"split": TEST, "families": 4, "style": "plain", "samples": 1, **changed})


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--split", "test", "--families", "0", "--output-dir", str(tmp_path)])
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert "the number of families is 0: use 1 to 8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--per-world", "3", "--output-dir", str(tmp_path)])
    assert "--per-world is for new worlds: give --split too" in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        bm25_hits.main([str(tmp_path / "missing.json")])
    assert "missing.json" in capsys.readouterr().err


def test_files_without_answers_can_not_be_measured() -> None:
    sample = {"ctxs": [{"text": "It rained."}], "question": "What fell?", "answers": ["snow"]}
    with pytest.raises(ValueError, match="no passage holds an answer"):
        bm25_hits.answer_hits([sample])
    with pytest.raises(ValueError, match="no passage holds an answer"):
        bm25_hits.answer_hits([sample | {"answers": ["rain"]}])  # a part of a word
    assert bm25_hits.answer_hits([sample | {"answers": ["RAINED"]}]).shares == (1.0, 1.0, 1.0)
