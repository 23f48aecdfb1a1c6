"""Loading data sets: ours as generated, foreign ones without the extra fields, broken ones with errors that help."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample, prompt_for
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.stage_inputs import read_stage_input
from vllm_blend.quality.make_datasets import main as write_datasets

INPUTS = Path(__file__).parents[2] / "inputs"
NAMES = {"musique_s": 150, "wikimqa_s": 200, "samsum": 200}
PLAIN = {
    "ctxs": [{"title": "", "text": "It rained."}, {"text": "It snowed."}],
    "question": "What?",
    "answers": ["rain"],
}


@pytest.fixture(scope="module", params=NAMES)
def dataset(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    return request.param, load_dataset(INPUTS / f"{request.param}.json")


def test_the_generator_writes_the_files_that_are_checked_in(tmp_path: Path) -> None:
    write_datasets(["--output-dir", str(tmp_path)])
    for name in NAMES:
        assert (tmp_path / f"{name}.json").read_bytes() == (INPUTS / f"{name}.json").read_bytes()


def test_sizes_and_formats(dataset: tuple[str, list[dict[str, Any]]]) -> None:
    name, samples = dataset
    assert len(samples) == NAMES[name]
    counts = [len(s["ctxs"]) for s in samples]
    if name == "samsum":
        assert min(counts) == 2 and max(counts) == 5
        assert all(s["question"].startswith("Dialogue: ") and s["question"].endswith("\nSummary:") for s in samples)
    else:
        assert min(counts) >= 8 and max(counts) <= 12 and 9.5 < sum(counts) / len(counts) < 10.5
    titled = name == "wikimqa_s"
    assert all(bool(c["title"]) == titled for s in samples for c in s["ctxs"])
    nested = name == "wikimqa_s"
    assert all(isinstance(s["answers"][0], list) == nested for s in samples)


def test_question_kinds_are_mixed_and_gold_passages_hold_the_answer(dataset: tuple[str, list[dict[str, Any]]]) -> None:
    name, raws = dataset
    samples = [normalize_sample(raw, i) for i, raw in enumerate(raws)]
    if name == "samsum":
        assert {(s.kind, s.gold) for s in samples} == {("sum", None)}
        return
    for kind in ("1hop", "cross", "2hop"):
        assert sum(s.kind == kind for s in samples) in range(len(samples) // 3, len(samples) // 3 + 2)
    for sample in samples:
        assert sample.gold
        assert sample.answers[0] in " ".join(sample.passages[i].text for i in sample.gold)
        assert all(p.page_id for p in sample.passages)


def test_prompts_and_answers_fit_the_demo_model(dataset: tuple[str, list[dict[str, Any]]]) -> None:
    name, raws = dataset
    tokenizer, style = AutoTokenizer.from_pretrained(INPUTS / "demo-model"), prompt_for(name)
    for i, raw in enumerate(raws):
        sample = normalize_sample(raw, i)
        prompt = build_qa_prompt(sample, name)
        pieces = [prompt["prefix"], *prompt["chunks"], prompt["suffix"]]
        length = 1 + sum(len(tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces)
        assert length + style.max_tokens <= 1024
        assert len(tokenizer.encode(f" {sample.answers[0]}\n", add_special_tokens=False)) <= style.max_tokens


def test_prompts_are_worded_as_in_training() -> None:
    raw = {**PLAIN, "ctxs": [{"title": "Weather", "text": "It rained."}, {"title": "", "text": "It snowed."}]}
    sample = normalize_sample(raw)
    assert build_qa_prompt(sample, "inputs/musique_s.json") == {
        "prefix": "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n",
        "chunks": ["Weather\n\nIt rained.\n\n", "It snowed.\n\n"],
        "suffix": "Question: What?\nAnswer:",
    }
    assert build_qa_prompt(sample, "wikimqa", passages=[1])["chunks"] == ["It snowed.\n\n"]
    prompt = build_qa_prompt(sample, "wikimqa", [0])
    assert "".join(map(str, [prompt["prefix"], *prompt["chunks"], prompt["suffix"]])) == (
        "Answer the question based on the given passages. Only give me the answer.\nPassages:\n"
        "Weather\n\nIt rained.\n\nQuestion: What?\nAnswer:"
    )
    with pytest.raises(IndexError, match="sample0 has passages 0 to 1, not 2"):
        build_qa_prompt(sample, "wikimqa", [2])


@pytest.mark.parametrize(
    "question", ["A: Hi", "Dialogue: A: Hi", "Dialogue: A: Hi\nSummary:", "Dialogue: A: Hi\nSummary: "]
)
def test_a_dialogue_is_asked_the_same_however_the_file_writes_it(question: str) -> None:
    assert prompt_for("samsum").suffix(question) == "Dialogue: A: Hi\nSummary:"


def test_an_unknown_data_set_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'squad'.*musique, wikimqa, samsum"):
        prompt_for("squad")


def test_a_file_without_the_extra_fields_loads(tmp_path: Path) -> None:
    path = write_json(tmp_path / "musique_s.json", [PLAIN, PLAIN])
    samples = [normalize_sample(raw, i) for i, raw in enumerate(load_dataset(path))]
    assert [s.sample_id for s in samples] == ["sample0", "sample1"]
    assert samples[1].chunk_id(1) == "sample1_chunk1"
    assert samples[0].kind is None and samples[0].gold is None
    assert [p.page_id for p in samples[0].passages] == [None, None]
    assert samples[0].passages[1].title == ""


def test_a_stage_output_loads_like_a_data_set(tmp_path: Path) -> None:
    assert load_dataset(write_json(tmp_path / "a.json", {"summary": {}, "results": [PLAIN]})) == [PLAIN]


def test_lines_of_json_load_with_passages_as_strings_or_with_titles(tmp_path: Path) -> None:
    own = {
        "question": "What?",
        "passages": ["It\u2028rained.", {"title": "B", "text": "It snowed."}],
        "answers": "rain",
    }
    path = tmp_path / "own_musique.jsonl"
    path.write_text(f"{json.dumps(own, ensure_ascii=False)}\n\n{json.dumps(PLAIN)}\r\n", encoding="utf-8")
    first, second = load_dataset(path)
    assert first["ctxs"] == [{"title": "", "text": "It\u2028rained."}, {"title": "B", "text": "It snowed."}]
    assert "passages" not in first and second == PLAIN
    stage = read_stage_input(RetrievalConfig(dataset_name="own_musique"), str(path), 0)
    assert [chunk.text for chunk in stage.samples[0].chunks] == ["It\u2028rained.\n\n", "B\n\nIt snowed.\n\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 3 is not valid JSON"),
        ('{"question": "a", "answers": "b"}', r"line 3: sample 1: ctxs is missing"),
        ('{"question": "a", "answers": "b", "passages": ["c", ""]}', r"line 3: sample 1: passages\[1\].text must be"),
        ('{"question": "a", "answers": "b", "passages": "c"}', r"line 3: sample 1: passages must be a non-empty list"),
    ],
)
def test_a_broken_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(PLAIN)}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl: {message}"):
        load_dataset(path)


@pytest.mark.parametrize(
    ("answers", "flat"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([["a", "b"], ["c"]], ("a", "b", "c")), ([""], ("",))],
)
def test_answers_may_be_flat_or_nested(answers: str | list[str] | list[list[str]], flat: tuple[str, ...]) -> None:
    assert normalize_sample({**PLAIN, "answers": answers}).answers == flat


def broken(**changes: Any) -> dict[str, Any]:
    sample: dict[str, Any] = copy.deepcopy(PLAIN)
    sample.update(changes)
    return {k: v for k, v in sample.items() if v is not ...}


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("text", "sample 1: the sample must be an object .* not str"),
        (broken(question=...), "sample 1: question is missing; the sample has 'ctxs', 'answers'"),
        (broken(question="  "), "sample 1: question must be a non-empty string, not empty"),
        (broken(ctxs=[]), "sample 1: ctxs must be a non-empty list .* not empty"),
        (broken(ctxs=["text"]), r"sample 1: ctxs\[0\] must be an object with title and text, not str"),
        (
            broken(ctxs=[{"text": "a"}, {"title": "b"}]),
            r"sample 1: ctxs\[1\].text must be .* null or missing; fill it or drop",
        ),
        (broken(ctxs=[{"text": "a", "title": 3}]), r"sample 1: ctxs\[0\].title must be a string, not int"),
        (broken(ctxs=[{"text": "a", "page_id": []}]), r"sample 1: ctxs\[0\].page_id must be a string or an integer"),
        (broken(answers=[]), "sample 1: answers must hold at least one answer"),
        (broken(answers=[["a"], 3]), "sample 1: answers must be a string or a .* not int"),
        (broken(gold=[2]), r"sample 1: gold must be a list of indices into ctxs \(0 to 1\)"),
        (broken(kind=1), "sample 1: kind must be a string, not int"),
        (broken(id="../up"), "sample 1: id must name a folder .* not '../up'"),
        (broken(id="sample0"), "sample 1: id 'sample0' is also the id of sample 0"),
    ],
)
def test_a_broken_sample_is_named_with_its_field(tmp_path: Path, sample: Any, message: str) -> None:
    path = write_json(tmp_path / "data.json", [PLAIN, sample])
    with pytest.raises(ValueError, match=f"data.json: {message}"):
        load_dataset(path)


@pytest.mark.parametrize("text", ["[", "", '{"rows": []}', "[]", "3"])
def test_a_file_that_is_no_data_set_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"data set .*data\.json"):
        load_dataset(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        load_dataset("nowhere.json")


def test_writing_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = write_json(tmp_path / "deep/data.json", {"a": "ü"})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "ü"}
    assert [p.name for p in path.parent.iterdir()] == ["data.json"]
