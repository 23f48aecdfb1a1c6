"""Scores against an independent implementation of the formulas, and Rouge-L against the library."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from vllm_blend.pipeline import evaluate as evaluation
from vllm_blend.pipeline.evaluate import best_score, evaluate, exact_match, f1_score, first_line, format_table, rouge_l
from vllm_blend.pipeline.files import write_json

WORDS = st.lists(st.sampled_from(["the", "A", "an", "cat", "Cat,", "sat", "mat.", "on", "1984", "-", "é"]), max_size=7)
TEXTS = WORDS.map(" ".join)


def reference_words(text: str) -> list[str]:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def reference_f1(prediction: str, answer: str) -> float:
    """Precision and recall by pairing off equal words one at a time."""
    if not prediction.strip():
        return 0.0
    predicted, expected = reference_words(prediction), reference_words(answer)
    if not predicted or not expected:
        return 1.0 if predicted == expected else 0.0
    left, shared = list(expected), 0
    for word in predicted:
        if word in left:
            left.remove(word)
            shared += 1
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


@given(TEXTS, TEXTS)
@settings(max_examples=300, deadline=None)
def test_f1_and_exact_match_follow_the_formula(prediction: str, answer: str) -> None:
    assert math.isclose(f1_score(prediction, answer), reference_f1(prediction, answer), abs_tol=1e-12)
    same = bool(prediction.strip()) and reference_words(prediction) == reference_words(answer)
    assert exact_match(prediction, answer) == float(same)


@given(TEXTS, TEXTS)
@settings(max_examples=50, deadline=None)
def test_rouge_l_is_the_librarys(prediction: str, answer: str) -> None:
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    assert rouge_l(prediction, answer) == scorer.score(target=answer, prediction=prediction)["rougeL"].fmeasure


def test_known_scores() -> None:
    assert f1_score("The cat sat", "a cat sat down") == pytest.approx(2 * 2 / (2 + 3))
    assert exact_match("the Exeter College.", "Exeter college") == 1.0
    assert f1_score("ran ran", "ran") == pytest.approx(2 / 3)
    assert rouge_l("the cats sat", "cat sat") == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))


@pytest.mark.parametrize("answers", ["Paris", ["Lyon", "Paris"], [["Lyon"], ["Rome", "Paris"]]])
def test_the_best_answer_counts_however_answers_are_nested(answers: str | list[str] | list[list[str]]) -> None:
    assert best_score(f1_score, "Paris", answers) == 1.0
    assert best_score(exact_match, "Berlin", answers) == 0.0


@pytest.mark.parametrize("output", ["", "  ", "\n\n"])
def test_an_empty_output_scores_nothing(output: str) -> None:
    for answer in ("Paris", "the", ""):
        assert evaluation.score_prediction(output, [answer]) == evaluation.Scores(0.0, 0.0, 0.0)


def test_an_answer_of_articles_can_still_be_right() -> None:
    assert exact_match("The", "the") == f1_score("The", "the") == 1.0
    assert exact_match("cat", "the") == f1_score("cat", "the") == 0.0


def test_the_answer_is_the_first_line() -> None:
    assert first_line(" \n Paris \nQuestion: and then?") == "Paris"
    assert evaluation.score_prediction("\nParis\nLyon", ["Paris"]).exact_match == 1.0


def test_groups_and_the_whole() -> None:
    records: list[dict[str, Any]] = [
        {"mode": "full", "prediction": "Paris", "answers": ["Paris"]},
        {"mode": "full", "prediction": "", "answers": ["Paris"]},
        {"mode": "reuse", "prediction": "Paris", "answers": [["Paris"]]},
        {"mode": "reuse", "prediction": "Paris now", "answers": [["Paris"]]},
    ]
    rows = evaluate(records, ["mode"])
    assert [(r["mode"], r["samples"], r["exact_match"]) for r in rows] == [
        ("full", 2, 0.5),
        ("reuse", 2, 0.5),
        ("all", 4, 0.5),
    ]
    assert rows[1]["f1"] == pytest.approx((1 + 2 / 3) / 2)
    assert evaluate(records) == [{k: v for k, v in rows[2].items() if k != "mode"}]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no predictions"),
        ([{"answers": ["a"], "mode": "x"}], "record 0: prediction is missing"),
        ([{"prediction": "a", "answers": ["a"]}], "record 0: mode is missing"),
        ([{"prediction": None, "answers": ["a"], "mode": "x"}], "record 0: prediction must be a string, not NoneType"),
        ([{"prediction": "a", "answers": [], "mode": "x"}], "record 0: answers is empty"),
        ([{"prediction": "a", "answers": [1], "mode": "x"}], "record 0: answers must be a string or .* not int"),
    ],
)
def test_broken_records_are_named(records: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(records, ["mode"])


def test_table() -> None:
    assert format_table([{"mode": "full", "n": 2, "f1": 0.5}, {"mode": "reuse", "n": 10, "f1": 1.0}]).splitlines() == [
        "| mode  |  n |    f1 |",
        "|-------|---:|------:|",
        "| full  |  2 |  50.0 |",
        "| reuse | 10 | 100.0 |",
    ]


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_json(tmp_path / "p.json", {"results": [{"prediction": "a cat", "answers": "cat", "kind": "1hop"}]})
    evaluation.main(["--predictions", str(path), "--group-by", "kind", "--output", str(tmp_path / "rows.json")])
    assert "| 1hop |       1 |       100.0 | 100.0 |" in capsys.readouterr().out
    assert [row["kind"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["1hop", "all"]


@pytest.mark.parametrize("text", ["{", '{"rows": []}', "[3]"])
def test_the_command_refuses_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["--predictions", str(tmp_path / "p.json")])
    assert stop.value.code == 1
    assert "error: " in capsys.readouterr().err
