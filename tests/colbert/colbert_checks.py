"""The colbert backend for real, with RAGatouille and a tiny checkpoint made on the spot.

RAGatouille excludes transformers 5, so these tests live outside the default run (pytest does not collect a file of this
name) and have a script that makes their environment:

    bash tests/colbert/run.sh
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.colbert.tiny_checkpoint import write_tiny_colbert
from vllm_blend.pipeline import retrieval as stage
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.retrieval import ColbertRetrieval

pytestmark = pytest.mark.slow

TEXTS = ["zzz qqq zzz qqq jjj", "aaaa eeee bbbb", "0123 4567 89", "mmmm nnnn pppp", "vvvv wwww uuuu"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_colbert(tmp_path_factory.mktemp("tiny-colbert"))


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> RetrievalConfig:
    return RetrievalConfig(backend="colbert", model_id=str(checkpoint), index_dir=str(tmp_path / "indexes"), top_k=2)


def make_sample(question: str, texts: list[str] = TEXTS) -> dict[str, Any]:
    return {"ctxs": [{"title": "", "text": text} for text in texts], "question": question, "answers": ["x"]}


def test_the_passage_that_says_the_same_comes_first(config: RetrievalConfig) -> None:
    samples = [make_sample(text) for text in TEXTS]
    retrieval = ColbertRetrieval(config)
    results = retrieval.retrieve(retrieval.prepare(samples))
    assert [r["retrieved_indices"][0] for r in results] == [0, 1, 2, 3, 4]
    for result in results:
        assert len(result["retrieved"]) == 2
        assert result["retrieved_indices_score"][0] > result["retrieved_indices_score"][1]
        assert result["retrieved"][0]["text"] == result["question"]


def test_an_index_is_kept_on_disk_and_used_again(config: RetrievalConfig) -> None:
    first = ColbertRetrieval(config).prepare([make_sample(TEXTS[1])])[0]
    index = Path(first["r_text_index"])
    assert (index / "pid_docid_map.json").is_file()
    written = {path: path.stat().st_mtime_ns for path in index.iterdir()}
    retrieval = ColbertRetrieval(config)
    again = retrieval.prepare([make_sample(TEXTS[3])])[0]
    assert again["r_text_index"] == first["r_text_index"]
    assert {path: path.stat().st_mtime_ns for path in index.iterdir()} == written
    assert retrieval.find_sample_top_k(again)[0][0] == 3


def test_other_passages_get_an_index_of_their_own(config: RetrievalConfig) -> None:
    samples = [make_sample(TEXTS[1]), {**make_sample(TEXTS[1], [*TEXTS[1:], TEXTS[0]]), "doc_id": "other/doc"}]
    first, second = ColbertRetrieval(config).prepare(samples)
    assert first["r_text_index"] != second["r_text_index"]
    assert Path(second["r_text_index"]).name.startswith("musique_s-other_doc-")
    assert ColbertRetrieval(config).find_sample_top_k(second)[0][0] == 0


def test_an_index_that_was_not_finished_is_built_again(config: RetrievalConfig) -> None:
    index = Path(ColbertRetrieval(config).prepare([make_sample(TEXTS[1])])[0]["r_text_index"])
    (index / "pid_docid_map.json").unlink()
    assert ColbertRetrieval(config).find_sample_top_k(make_sample(TEXTS[1]))[0][0] == 1
    assert (index / "pid_docid_map.json").is_file()


def test_a_single_passage_needs_no_index(config: RetrievalConfig) -> None:
    retrieval = ColbertRetrieval(config)
    (sample,) = retrieval.prepare([make_sample("a", ["a"])])
    indices, scores = retrieval.find_sample_top_k(sample)
    assert sample["r_text_index"] == "" and indices == [0] and scores[0] > 0


def test_a_directory_without_colberts_settings_is_refused(config: RetrievalConfig, tmp_path: Path) -> None:
    folder = write_tiny_colbert(tmp_path / "incomplete")
    (folder / "artifact.metadata").unlink()
    with pytest.raises(FileNotFoundError, match=r"incomplete has no artifact\.metadata"):
        ColbertRetrieval(RetrievalConfig(backend="colbert", model_id=str(folder), index_dir=str(tmp_path)))


@pytest.mark.parametrize("scope", ["sample", "corpus"])
def test_the_command_with_the_colbert_backend(checkpoint: Path, tmp_path: Path, scope: str) -> None:
    samples = [{**make_sample(text), "gold": [i], "kind": "1hop"} for i, text in enumerate(TEXTS)]
    data = write_json(tmp_path / "own_musique.json", samples)
    model = ["--backend", "colbert", "--model-id", str(checkpoint), "--index-dir", str(tmp_path / "indexes")]
    stage.main([*model, "--dataset", str(data), "--top-k", "1", "--scope", scope, "--output-dir", str(tmp_path)])
    output = json.loads((tmp_path / "own_musique_rag_both_k1.json").read_text())
    assert output["summary"]["recall"] == 1.0
