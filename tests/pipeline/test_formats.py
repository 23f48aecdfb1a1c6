"""The published forms of data sets: each is read as it is, told by its fields, and a broken one is named."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.pipeline import load_dataset, normalize_sample
from vllm_blend.pipeline.datasets import read_dataset
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.formats.longbench import split_context

pytestmark = pytest.mark.cpu_only

SENTENCES = ["It rains.", " It pours. "]
HOTPOT = {
    "_id": "5a7f",
    "question": " Which? ",
    "answer": "B",
    "type": "bridge",
    "supporting_facts": [["Rain", 0]],
    "context": [["Snow", ["It snows."]], ["Nothing", []], ["Rain", SENTENCES]],
}
HUB_HOTPOT = HOTPOT | {
    "supporting_facts": {"title": ["Rain"], "sent_id": [0]},
    "context": {"title": ["Snow", "Nothing", "Rain"], "sentences": [["It snows."], [], SENTENCES]},
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Who?",
    "answer": "Cy",
    "answer_aliases": ["C", "Cy"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Bo", "paragraph_text": "Bo sings.", "is_supporting": False},
        {"idx": 1, "title": "Cy", "paragraph_text": "Cy hums. ", "is_supporting": True},
    ],
}
LONGBENCH = {
    "input": "Who?",
    "context": "Passage 1:\nBo\nBo sings.\n\nPassage 2:\nCy\nCy hums.",
    "answers": ["Cy", "C"],
    "dataset": "hotpotqa",
    "all_classes": None,
    "_id": "ab12",
}
QA = {"id": "q1", "question": "Who?", "answers": [{"text": "Cy", "answer_start": 0}, {"text": "Cy", "answer_start": 9}]}
UNANSWERABLE = QA | {"id": "q2", "answers": [], "is_impossible": True}
ARTICLES = [
    {
        "title": "A",
        "paragraphs": [{"context": "Cy hums. Cy!", "qas": [QA, UNANSWERABLE]}, {"context": "a1", "qas": []}],
    },
    {"title": "B", "paragraphs": [{"context": f"b{number} ", "qas": []} for number in range(20)]},
]
CACHEBLEND = {"ctxs": [{"title": "", "text": "Bo."}], "question": "Who?", "answers": [["Bo"]]}
OURS = {"question": "Who?", "passages": ["Bo.", {"title": "Cy", "text": "Hums."}], "answers": "Bo"}


def squad() -> dict[str, Any]:
    return {"version": "1.1", "data": copy.deepcopy(ARTICLES)}


def lines(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


@pytest.mark.parametrize("raw", [HOTPOT, HUB_HOTPOT], ids=["official", "hub"])
def test_hotpotqa_and_2wikimultihopqa(tmp_path: Path, raw: dict[str, Any]) -> None:
    expected = {
        "ctxs": [{"title": "Snow", "text": "It snows."}, {"title": "Rain", "text": "It rains. It pours."}],
        "question": "Which?",
        "answers": ["B"],
        "id": "5a7f",
        "kind": "bridge",
        "gold": [1],
    }
    assert load_dataset(write_json(tmp_path / "a.json", [raw])) == [expected]
    assert load_dataset(lines(tmp_path / "no_name_says_it", [raw, raw | {"_id": "b"}])) == [
        expected,
        expected | {"id": "b"},
    ]


def test_musique_without_the_questions_that_have_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = lines(tmp_path / "a.jsonl", [MUSIQUE, MUSIQUE | {"id": "3hop1__2", "answerable": False}])
    with caplog.at_level(logging.WARNING):
        [sample] = load_dataset(path)
    assert "1 of 2 questions are left out" in caplog.text
    assert sample == {
        "ctxs": [{"title": "Bo", "text": "Bo sings."}, {"title": "Cy", "text": "Cy hums."}],
        "question": "Who?",
        "answers": ["Cy", "C"],
        "id": "2hop__1_2",
        "kind": "2hop",
        "gold": [1],
    }
    with pytest.raises(ValueError, match=r"a\.json: no question has an answer"):
        load_dataset(write_json(tmp_path / "a.json", [MUSIQUE | {"answerable": False}]))


def test_squad_has_the_gold_paragraph_among_nine_others(tmp_path: Path) -> None:
    found = read_dataset(write_json(tmp_path / "a.json", squad()))
    assert (found.format, found.num_unanswerable) == ("SQuAD", 1)
    sample = normalize_sample(found.samples[0])
    texts = [passage.text for passage in sample.passages]
    assert len(texts) == len(set(texts)) == 10 and sum(text[0] == "b" for text in texts) == 8
    assert sample.gold is not None and texts[sample.gold[0]] == "Cy hums. Cy!" and sample.answers == ("Cy",)
    assert found == read_dataset(write_json(tmp_path / "b.json", squad()))  # whatever the file is called
    articles = squad()["data"]
    assert found == read_dataset(write_json(tmp_path / "c.json", articles))
    assert found == read_dataset(lines(tmp_path / "c.jsonl", articles))


def test_squad_with_a_record_for_each_question(tmp_path: Path) -> None:
    first = {"id": "q1", "title": "A", "context": "Cy hums.", "question": "Who?", "answers": {"text": ["Cy"]}}
    second = first | {"id": "q2", "title": "B", "context": "Bo sings.", "answers": {"text": []}}
    found = read_dataset(lines(tmp_path / "a.jsonl", [first, first | {"id": "q3"}, second]))
    assert [sample["id"] for sample in found.samples] == ["q1", "q3"] and found.num_unanswerable == 1
    assert sorted(ctx["text"] for ctx in found.samples[0]["ctxs"]) == ["Bo sings.", "Cy hums."]


def test_longbench_is_taken_apart(tmp_path: Path) -> None:
    [sample] = load_dataset(lines(tmp_path / "a.jsonl", [LONGBENCH]))
    assert [ctx["text"] for ctx in sample["ctxs"]] == ["Bo\nBo sings.", "Cy\nCy hums."]
    assert (sample["question"], sample["answers"], sample["id"]) == ("Who?", ["Cy", "C"], "ab12")
    long = "word " * 100
    assert split_context(f"Heading\n\n{long}\n \n{long}x") == [f"Heading\n{long.strip()}", f"{long}x"]
    assert split_context(f"{long}\n{long}") == [long.strip()] * 2
    assert split_context("Preface.\nPassage 1:\n a\n") == ["Preface.", "a"]


def test_our_own_form_and_cacheblends(tmp_path: Path) -> None:
    assert load_dataset(write_json(tmp_path / "a.json", [CACHEBLEND])) == [CACHEBLEND]
    [ours, theirs] = load_dataset(lines(tmp_path / "a.jsonl", [OURS, CACHEBLEND]))
    assert ours["ctxs"] == [{"title": "", "text": "Bo."}, {"title": "Cy", "text": "Hums."}] and theirs == CACHEBLEND


def test_an_id_becomes_one_that_a_folder_may_have(tmp_path: Path) -> None:
    raws = [HOTPOT | {"_id": "../a b"}, HOTPOT | {"_id": "//"}]
    loaded = load_dataset(write_json(tmp_path / "a.json", raws))
    assert [normalize_sample(raw, i).sample_id for i, raw in enumerate(loaded)] == ["a_b", "sample1"]
    with pytest.raises(ValueError, match=r"sample 1: id '5a7f' is also the id of sample 0"):
        load_dataset(write_json(tmp_path / "b.json", [HOTPOT, HOTPOT]))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"text": "a"}, "line 1: sample 0 has 'text', which are not those of a known format"),
        ({}, "line 1: sample 0 has no fields, which"),
        (HOTPOT | {"answer": ""}, "answer must be a non-empty string, not empty; fill it or drop"),
        (HOTPOT | {"context": []}, "context must be a non-empty list of"),
        (HOTPOT | {"context": [["T", ["a"]], ["T", "a"]]}, r"context\[1\] must be \[title, \[sentence, ...\]\]"),
        (HOTPOT | {"context": [["T", [3]]]}, r"context\[0\]\[1\] must hold sentences"),
        (HOTPOT | {"context": [["T", [" "]]]}, "context has no paragraph with a sentence"),
        (
            HOTPOT | {"context": {"title": ["T"], "sentences": [["a"], ["b"]]}},
            "context has 1 titles for 2 lists of .*read as Hotpot",
        ),
        (HOTPOT | {"supporting_facts": "T"}, "supporting_facts must be a list"),
        (MUSIQUE | {"paragraphs": [{"title": "T"}]}, r"paragraphs\[0\].paragraph_text must be a .* null or missing"),
        (MUSIQUE | {"paragraphs": [[]]}, r"paragraphs\[0\] must be an object with title and paragraph_text"),
        (MUSIQUE | {"answer_aliases": "a"}, "answer_aliases must be a list of strings"),
        (LONGBENCH | {"input": ""}, "input must be a question: give a data set that asks some"),
        (LONGBENCH | {"answers": []}, "answers must be a non-empty list of strings, not empty"),
        ({"paragraphs": [{"context": "a"}]}, r"paragraphs\[0\].qas must be a list of questions"),
        ({"paragraphs": [{"context": "a", "qas": [{"question": "b"}]}]}, r"paragraphs\[0\].qas\[0\].answers must be"),
        ({"question": "a", "context": "b", "answers": {}}, r'answers must be \{"text": \[...\]\}'),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"data set .*a\.jsonl: (line 1: sample 0: )?{message}"):
        load_dataset(lines(tmp_path / "a.jsonl", [raw]))


def test_an_article_is_named_with_its_place(tmp_path: Path) -> None:
    broken = squad()
    broken["data"][1]["paragraphs"][2]["context"] = None
    with pytest.raises(ValueError, match=r"a\.json: data\[1\]: paragraphs\[2\]\.context must be"):
        load_dataset(write_json(tmp_path / "a.json", broken))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=4) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("title"), inner),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) within a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


@st.composite
def damaged(draw: Callable[[Any], Any]) -> tuple[Any, bool]:
    """A data set with something else, or nothing, in one place; and whether it is JSON in lines."""
    raws: list[Any] = [HOTPOT, HUB_HOTPOT, MUSIQUE, LONGBENCH, CACHEBLEND, OURS, squad()]
    data = [copy.deepcopy(draw(st.sampled_from(raws))) for _ in range(draw(st.integers(1, 2)))]
    container, key = draw(st.sampled_from(places(data)))
    if draw(st.booleans()):
        container[key] = draw(JSON)
    else:
        del container[key]
    is_whole = len(data) == 1 and draw(st.booleans())
    return (data[0] if is_whole else data), not is_whole and draw(st.booleans())


@given(damaged())
def test_what_is_damaged_is_read_or_named(tmp_path_factory: pytest.TempPathFactory, case: tuple[Any, bool]) -> None:
    data, in_lines = case
    path = tmp_path_factory.getbasetemp() / ("damaged.jsonl" if in_lines else "damaged.json")
    path.write_text("\n".join(map(json.dumps, data)) if in_lines else json.dumps(data))
    check(path)


@given(st.binary(max_size=40), st.sampled_from([b"", b'{"question": "a"}\n', b"[["]))
def test_any_bytes_are_named(tmp_path_factory: pytest.TempPathFactory, content: bytes, start: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(start + content)
    with pytest.raises(ValueError, match=r"data set .*bytes"):
        load_dataset(path)


def check(path: Path) -> None:
    """Assert that a file gives whole samples, or an error that names it."""
    try:
        samples = load_dataset(path)
    except ValueError as error:
        assert str(path) in str(error)
        return
    assert samples
    for index, raw in enumerate(samples):
        sample = normalize_sample(raw, index)
        assert sample.passages and sample.question.strip() and sample.answers
        assert all(passage.searchable.encode() for passage in sample.passages)  # a tokenizer takes it
