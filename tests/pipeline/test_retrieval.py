"""Retrieval with BM25: the scores, the places of neighbours, the keys in a sample, recall, and the command."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vllm_blend.pipeline import retrieval as stage
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.datasets import SamplePassage, load_dataset
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.retrieval import BM25Retrieval, ColbertRetrieval, run_retrieval, summarize
from vllm_blend.pipeline.retriever import Collection, Hit, fill_places

ROOT = Path(__file__).parents[2]
TEXTS = ["owls hunt mice", "mice eat cheese", "owls sleep, owls fly", "cheese is yellow", "yellow paint"]


def make_sample(texts: list[str], question: str = "What do owls hunt?", **extra: Any) -> dict[str, Any]:
    ctxs = [{"title": "", "text": text} for text in texts]
    return {"ctxs": ctxs, "question": question, "answers": ["mice"], **extra}


def collection(pages: list[str | None], texts: list[str] | None = None) -> Collection:
    texts = texts or [f"text {i}" for i in range(len(pages))]
    return Collection("c", tuple(SamplePassage("", t, p) for t, p in zip(texts, pages, strict=True)))


def lucene_bm25(texts: list[list[str]], query: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    """BM25 as Lucene has it: idf ln(1 + (N - n + 0.5) / (n + 0.5)), no (k1 + 1) in the numerator."""
    average = sum(map(len, texts)) / len(texts)
    scores = []
    for words in texts:
        score, counts = 0.0, Counter(words)
        for word in query:
            holding = sum(word in other for other in texts)
            idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
            norm = k1 * (1 - b + b * len(words) / average)
            score += idf * counts[word] / (counts[word] + norm)
        scores.append(score)
    return scores


def test_scores_are_bm25() -> None:
    retrieval = BM25Retrieval(RetrievalConfig(top_k=5))
    indices, scores = retrieval.find_sample_top_k(make_sample(TEXTS, "owls hunt yellow owls"))
    words = [text.replace(",", "").split() for text in TEXTS]
    words[3].remove("is")  # a stop word
    expected = lucene_bm25(words, ["owls", "hunt", "yellow", "owls"])
    assert indices == sorted(range(5), key=lambda i: -expected[i])
    assert scores == pytest.approx(sorted(expected, reverse=True), rel=1e-5)


def test_ties_and_unknown_words_keep_the_order_of_the_passages() -> None:
    retrieval = BM25Retrieval(RetrievalConfig(top_k=3))
    assert retrieval.find_sample_top_k(make_sample(TEXTS, "zebras?")) == ([0, 1, 2], [0.0, 0.0, 0.0])
    assert retrieval.find_sample_top_k(make_sample(["the", "of"], "of what?")) == ([0, 1], [0.0, 0.0])


def test_titles_are_searched() -> None:
    sample = make_sample(TEXTS)
    sample["ctxs"][4]["title"] = "Zebras"
    assert BM25Retrieval(RetrievalConfig(top_k=1)).find_sample_top_k({**sample, "question": "zebras?"})[0] == [4]


def test_a_sample_keeps_its_fields_and_gains_what_was_found() -> None:
    config = RetrievalConfig(top_k=2, retrieved_key="found", question_key="ask")
    sample = make_sample(TEXTS, ask="which owls fly?", extra=1)
    before = json.loads(json.dumps(sample))
    (result,) = BM25Retrieval(config).retrieve(BM25Retrieval(config).prepare([sample]))
    assert {key: result[key] for key in before} == before
    assert result["found"] == [2, 0] and len(result["found_score"]) == 2
    assert [hit["text"] for hit in result["retrieved"]] == [TEXTS[2], TEXTS[0]]
    assert [hit["score"] for hit in result["retrieved"]] == result["found_score"]
    assert set(result["retrieved"][0]) == {"index", "title", "text", "page_id", "score", "neighbor_of"}
    assert "r_text_index" not in result


def test_a_question_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 0: ask must be a non-empty string"):
        BM25Retrieval(RetrievalConfig(question_key="ask")).find_sample_top_k(make_sample(TEXTS))


def test_a_list_of_allowed_passages_is_kept_to_before_the_cut() -> None:
    config = RetrievalConfig(top_k=2, page_id_key="page_ids")
    sample = make_sample(TEXTS, "owls hunt?", page_ids=[1, 2, 3])
    assert BM25Retrieval(config).find_sample_top_k(sample)[0] == [2, 1]
    in_corpus = BM25Retrieval(RetrievalConfig(scope="corpus", page_id_key="page_ids"))
    in_corpus.prepare([sample])
    with pytest.raises(ValueError, match="page_ids works in scope sample only"):
        in_corpus.find_sample_top_k(sample)


def test_neighbors_take_the_places_after_their_hit() -> None:
    pages = collection(["a", "a", "a", "b", "b", None, None, "c"])
    ranking = [(1, 9.0), (5, 8.0), (4, 7.0), (0, 6.0), (7, 5.0)]
    assert fill_places(pages, ranking, 3, False) == [Hit(1, 9.0), Hit(5, 8.0), Hit(4, 7.0)]
    assert fill_places(pages, ranking, 9, True) == [
        Hit(1, 9.0),
        Hit(0, 9.0, neighbor_of=1),
        Hit(2, 9.0, neighbor_of=1),
        Hit(5, 8.0),
        Hit(4, 7.0),
        Hit(3, 7.0, neighbor_of=4),
        Hit(7, 5.0),
    ]
    assert [hit.index for hit in fill_places(pages, ranking, 2, True)] == [1, 0]


def test_a_page_that_comes_again_later_is_no_neighbor() -> None:
    assert collection(["a", "b", "a"]).neighbors(0) == []


def test_passages_without_page_ids_share_a_page_where_they_share_a_title() -> None:
    titled = Collection("c", tuple(SamplePassage(t, t + str(i), None) for i, t in enumerate(["x", "x", "y", "", ""])))
    assert [titled.neighbors(i) for i in range(5)] == [[1], [0], [], [], []]


def test_neighbors_without_any_page_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        BM25Retrieval(RetrievalConfig(include_neighbors=True)).prepare([make_sample(TEXTS)])
    assert "no passage names its page" in caplog.text


def test_the_corpus_is_all_passages_once() -> None:
    samples = [make_sample(TEXTS[:3]), make_sample(TEXTS[2:], "yellow paint?")]
    retrieval = BM25Retrieval(RetrievalConfig(scope="corpus", top_k=9))
    with pytest.raises(RuntimeError, match="call prepare"):
        retrieval.find_sample_top_k(samples[0])
    results = retrieval.retrieve(retrieval.prepare(samples))
    assert [sorted(hit["text"] for hit in r["retrieved"]) for r in results] == [sorted(TEXTS)] * 2
    assert results[0]["retrieved"][0]["text"] == TEXTS[0] and results[1]["retrieved"][0]["text"] == TEXTS[4]


def test_recall_counts_gold_passages_by_kind() -> None:
    config = RetrievalConfig(top_k=2)
    samples = [
        make_sample(TEXTS, "owls hunt?", gold=[0, 2], kind="2hop"),
        make_sample(TEXTS, "owls hunt?", gold=[0, 3], kind="2hop"),
        make_sample(TEXTS, "owls hunt?", gold=[3], kind="1hop"),
        make_sample(TEXTS),
    ]
    retrieval = BM25Retrieval(config)
    assert summarize(retrieval.retrieve(samples), config) == {
        "samples": 4,
        "samples_with_gold": 3,
        "recall": 0.5,
        "all_gold": pytest.approx(1 / 3),
        "by_kind": {
            "2hop": {"samples": 2, "recall": 0.75, "all_gold": 0.5},
            "1hop": {"samples": 1, "recall": 0.0, "all_gold": 0.0},
        },
    }


def test_recall_is_unknown_without_gold() -> None:
    config = RetrievalConfig(top_k=2)
    summary = summarize(BM25Retrieval(config).retrieve([make_sample(TEXTS)]), config)
    assert summary["recall"] is None and summary["samples_with_gold"] == 0 and summary["by_kind"] == {}


def test_recall_finds_gold_passages_by_content_in_the_corpus() -> None:
    samples = [make_sample(TEXTS[:3], "mice eat?", gold=[1]), make_sample(TEXTS[3:], "yellow paint?", gold=[1])]
    config = RetrievalConfig(scope="corpus", top_k=1)
    retrieval = BM25Retrieval(config)
    assert summarize(retrieval.retrieve(retrieval.prepare(samples)), config)["recall"] == 1.0


def test_on_the_shipped_data_neighbors_find_more_gold_than_plain_bm25(tmp_path: Path) -> None:
    recalls = {}
    for neighbors in (False, True):
        config = RetrievalConfig(
            dataset_path=str(ROOT / "inputs/musique_s.json"), output_dir=str(tmp_path), include_neighbors=neighbors
        )
        recalls[neighbors] = run_retrieval(config)["summary"]["recall"]
    assert 0.8 < recalls[False] < recalls[True] < 1


def test_colbert_without_its_environment_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ragatouille", None)
    with pytest.raises(ImportError, match=r"pip install -r requirements-colbert\.txt"):
        ColbertRetrieval(RetrievalConfig())


def test_the_command_writes_what_the_next_stage_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_json(tmp_path / "own_musique.json", [make_sample(TEXTS, gold=[0])])
    stage.main(["--dataset", str(data), "--top-k", "2", "--output-dir", str(tmp_path / "out")])
    path = tmp_path / "out/own_musique_rag_both_k2.json"
    output = json.loads(path.read_text())
    assert output["summary"]["recall"] == 1.0 and output["config"]["top_k"] == 2
    assert load_dataset(path) == output["results"]
    assert f"1 questions -> {path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dataset", "nowhere.json"], "data set not found: nowhere.json"),
        (["--backend", "colbert", "--dataset", str(ROOT / "inputs/musique_s.json")], "requirements-colbert.txt"),
    ],
)
def test_the_command_explains_what_is_wrong(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ragatouille", None)
    with pytest.raises(SystemExit) as stop:
        stage.main(flags)
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


def run_script(script: str, cwd: Path, flags: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(["bash", ROOT / script, *flags], cwd=cwd, env=environment, capture_output=True, text=True)


def test_the_script_runs_from_anywhere_and_takes_the_environment(tmp_path: Path) -> None:
    variables = {"DATASET": "inputs/samsum.json", "TOP_K": "3", "MAX_SAMPLES": "2", "INCLUDE_NEIGHBORS": "true"}
    done = run_script("scripts/retrieval/run_retrieval.sh", tmp_path, [], OUTPUT_DIR=str(tmp_path / "out"), **variables)
    assert done.returncode == 0, done.stderr
    output = json.loads((tmp_path / "out/samsum_rag_both_k3.json").read_text())
    assert len(output["results"]) == 2 and output["config"]["include_neighbors"] is True


def test_the_script_passes_flags_on_and_fails_when_the_stage_fails(tmp_path: Path) -> None:
    done = run_script("scripts/retrieval/run_retrieval.sh", tmp_path, ["--top-k", "0"])
    assert done.returncode == 2 and "retrieval.top_k=0 must be a whole number of at least 1" in done.stderr


def test_the_token_budget_script_takes_the_environment(tmp_path: Path) -> None:
    output = tmp_path / "budget.json"
    variables = {"GPU_MEMORY": "64MiB", "CPU_MEMORY": "0", "CHUNK_TOKENS": "64", "OUTPUT": str(output)}
    done = run_script("scripts/run_token_budget_test.sh", tmp_path, [], **variables)
    assert done.returncode == 0, done.stderr
    budget = json.loads(output.read_text())
    assert budget["chunk_tokens"] == 64 and budget["cpu_chunks"] == 0 and budget["gpu_chunks"] > 0
