"""Stage 2: the KV of every passage, right, complete, marked, and computed only where it has to be."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pipeline.stages import MODEL, Stages, demo_samples
from vllm_blend import LLM, SamplingParams
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.kv_store.format import load_chunk
from vllm_blend.pipeline import build_kv_cache as stage
from vllm_blend.pipeline.chunk_cache import MOST_NAMED
from vllm_blend.pipeline.config import PrefillConfig
from vllm_blend.pipeline.files import read_json
from vllm_blend.pipeline.stage_inputs import read_stage_input


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    stages = Stages.over(tmp_path_factory.mktemp("built"), demo_samples(2))
    stages.build()
    return stages


@pytest.fixture
def stages(built: Stages, tmp_path: Path) -> Stages:
    """A copy to damage."""
    shutil.copytree(built.root, tmp_path / "copy")
    return Stages(tmp_path / "copy")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = Stages.over(tmp_path, demo_samples(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(ValueError, match=r"tokens in float32 takes 0.0\d GiB, and .* has room for 0.00: name another"):
        stages.build()
    assert not list(stages.chunks.glob("*/metadata.json"))


def test_every_passage_has_a_folder_and_the_best_are_for_the_gpu(built: Stages) -> None:
    output = read_json(built.chunks / "musique_t_kv_top2.json", "summary")
    stage_input = read_stage_input(built.retrieval, "", 0)
    assert (
        output["summary"]["computed"] == output["summary"]["chunks"] == sum(len(s["ctxs"]) for s in demo_samples(2)) + 1
    )
    assert output["summary"]["reused"] == 0 and output["prefix"]["folder"] == "musique_t_prefix"
    for described, sample in zip(output["samples"], stage_input.samples, strict=True):
        assert [c["chunk_id"] for c in described["chunks"]] == [chunk.chunk_id for chunk in sample.chunks]
        on_gpu = {c["chunk_id"] for c in described["chunks"] if c["placement"] == "gpu"}
        assert on_gpu == {chunk.chunk_id for chunk in sample.best(2)}
        assert all(c["placement"] in ("gpu", "cpu") for c in described["chunks"])
        ranked = sorted((c["rank"], c["chunk_id"]) for c in described["chunks"] if c["rank"] is not None)
        assert [name for _, name in ranked] == [chunk.chunk_id for chunk in sample.best(9)]
        for chunk in described["chunks"]:
            metadata = json.loads((built.chunks / chunk["folder"] / "metadata.json").read_text())
            assert (metadata["key"], metadata["num_tokens"]) == (chunk["key"], chunk["tokens"])


def test_a_stored_chunk_is_what_a_plain_prefill_computes(built: Stages) -> None:
    llm = LLM(MODEL)
    stage_input = read_stage_input(built.retrieval, "", 0)
    chunk, instruction = stage_input.samples[1].chunks[3], stage_input.asking.prefix
    prefix, [chunk_id] = llm.llm_engine.identify_chunks(instruction, [chunk.text])
    assert prefix is not None
    stored = load_chunk(built.chunks / chunk.chunk_id, chunk_id, llm.llm_engine.fingerprint)
    decoder: Any = llm.llm_engine.decoder
    decoder.cache_fuse_metadata["collect"] = True
    ids = [*prefix.token_ids, *chunk_id.token_ids]
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1), use_tqdm=False)
    for layer, k, v in zip(decoder.layers, stored.k, stored.v, strict=True):
        fresh_k, fresh_v = (kv[len(prefix.token_ids) :] for kv in layer.self_attn.hack_kv)
        torch.testing.assert_close(k.flatten(1), fresh_k, atol=1e-4, rtol=0)
        torch.testing.assert_close(v.flatten(1), fresh_v, atol=1e-4, rtol=0)


def test_a_second_run_computes_nothing_and_touches_nothing(stages: Stages) -> None:
    before = {path: path.stat().st_mtime_ns for path in stages.chunks.glob("*/*")}
    summary = stages.build()["summary"]
    assert summary["computed"] == 0 and summary["reused"] == summary["chunks"] and summary["bytes_written"] == 0
    assert {path: path.stat().st_mtime_ns for path in stages.chunks.glob("*/*")} == before


def test_a_cause_that_many_chunks_share_is_told_once(stages: Stages, caplog: pytest.LogCaptureFixture) -> None:
    names = sorted(path.name for path in stages.chunks.iterdir() if path.is_dir())
    for name in names:
        path = stages.chunks / name / "metadata.json"
        metadata = json.loads(path.read_text())
        metadata["model"]["weights"] = "another"
        path.write_text(json.dumps(metadata))
    with caplog.at_level(logging.WARNING):
        assert stages.build()["summary"]["recomputed_foreign"] == len(names)
    told = [record.getMessage() for record in caplog.records if "computed again" in record.getMessage()]
    assert len(told) == MOST_NAMED + 1
    assert told[-1].startswith(f"{len(names) - MOST_NAMED} more stored chunks are another model's")


def test_a_second_run_computes_just_what_is_missing_or_damaged(
    stages: Stages, caplog: pytest.LogCaptureFixture
) -> None:
    names = sorted(path.name for path in stages.chunks.iterdir() if path.is_dir())
    contents = {name: (stages.chunks / name / "keys.pt").read_bytes() for name in names}
    gone, unfinished, cut, foreign, misplaced = names[:5]
    shutil.rmtree(stages.chunks / gone)
    (stages.chunks / unfinished / "metadata.json").unlink()
    (stages.chunks / cut / "values.pt").write_bytes(contents[cut][:100])
    metadata = json.loads((stages.chunks / foreign / "metadata.json").read_text())
    metadata["model"]["weights"] = "another"
    (stages.chunks / foreign / "metadata.json").write_text(json.dumps(metadata))
    shutil.rmtree(stages.chunks / misplaced)
    shutil.copytree(stages.chunks / names[6], stages.chunks / misplaced)  # a whole chunk in another one's place
    with caplog.at_level(logging.WARNING):
        summary = stages.build()["summary"]
    assert (summary["computed"], summary["recomputed_damaged"], summary["recomputed_foreign"]) == (5, 2, 2)
    assert all(name in caplog.text for name in (unfinished, cut, foreign, misplaced)) and gone not in caplog.text
    assert {name: (stages.chunks / name / "keys.pt").read_bytes() for name in names}.keys() == contents.keys()
    assert stages.build()["summary"]["computed"] == 0


def test_passages_of_the_same_content_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = LLMEngine.encode_chunks

    def counting(self: LLMEngine, prefix: str, chunks: list[str], **options: Any) -> object:
        encoded.append(len(chunks))
        return encode(self, prefix, chunks, **options)

    monkeypatch.setattr(LLMEngine, "encode_chunks", counting)
    [sample] = demo_samples(1)
    samples = [{**sample, "id": "a"}, {**sample, "id": "b"}]
    output = Stages.over(tmp_path, samples).build()
    assert sum(encoded) == len(sample["ctxs"]) + 1
    assert output["summary"]["distinct_chunks"] == len(sample["ctxs"]) + 1
    assert output["summary"]["computed"] == 2 * len(sample["ctxs"]) + 1
    keys = [[chunk["key"] for chunk in described["chunks"]] for described in output["samples"]]
    assert keys[0] == keys[1]
    for i in range(len(sample["ctxs"])):
        folders = [tmp_path / f"kv_caches/musique_t-{name}_chunk{i}" for name in "ab"]
        assert torch.equal(*(torch.load(folder / "keys.pt", weights_only=True) for folder in folders))


def test_a_passage_that_no_prompt_can_hold_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [sample] = demo_samples(1)
    sample["ctxs"][1]["text"] = "A lens. " * 600
    stages = Stages.over(tmp_path, [sample])
    with caplog.at_level(logging.WARNING):
        output = stages.build()
    assert output["summary"]["too_long"] == 1 and output["samples"][0]["too_long"] == ["musique_t-musique_s-000_chunk1"]
    assert "musique_s-000_chunk1 has" in caplog.text
    assert output["summary"]["computed"] == len(sample["ctxs"])


def test_an_instruction_that_leaves_no_place_for_passages_is_named(tmp_path: Path) -> None:
    stages = Stages.over(tmp_path, demo_samples(1))
    retrieval = replace(stages.retrieval, instruction="A lens. " * 2000)
    with pytest.raises(ValueError, match=r"the instruction has .* no passage has a place after it"):
        stage.build_kv_cache(PrefillConfig(model_id=MODEL, output_dir=str(stages.chunks)), retrieval)


def test_without_a_retrieval_the_first_passages_are_for_the_gpu(tmp_path: Path) -> None:
    stages = Stages.over(tmp_path, demo_samples(1))
    shutil.rmtree(tmp_path / "retrieval")
    [described] = stages.build()["samples"]
    assert [c["placement"] for c in described["chunks"]][:4] == ["gpu", "gpu", "cpu", "cpu"]
    assert {c["rank"] for c in described["chunks"]} == {None}


def test_mistakes_end_the_command_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--retrieval-json", str(tmp_path / "no.json")], "not found"),
        (["--dataset", str(tmp_path / "musique_no.json")], "not found"),
        (["--dataset", "inputs/musique_s.json", "--model-id", str(tmp_path / "no-model")], "no-model"),
    ):
        with pytest.raises(SystemExit) as ended:
            stage.main([*flags, "--output-dir", str(tmp_path)])
        assert ended.value.code == 1 and message in capsys.readouterr().err
