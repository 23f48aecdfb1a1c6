"""Stage 3: stored KV is what answers, the trace tells each step, and what cannot be used is computed again."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.stages import MODEL, Stages, demo_samples
from vllm_blend import LLM, ChunkedPrompt, SamplingParams
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.format import load_chunk, write_chunk
from vllm_blend.pipeline import speculative_decode as stage
from vllm_blend.pipeline.stage_inputs import read_stage_input

COUNT = 3


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    stages = Stages.over(tmp_path_factory.mktemp("built"), demo_samples(COUNT))
    stages.build()
    return stages


@pytest.fixture(scope="module")
def trace(built: Stages) -> dict[str, Any]:
    built.decode()
    written: dict[str, Any] = json.loads((built.root / "trace.json").read_text())
    return written


def test_the_chunks_come_from_the_folders(trace: dict[str, Any]) -> None:
    summary = trace["summary"]
    assert summary["samples"] == COUNT and summary["failed"] == 0
    assert summary["chunks"] == {"loaded": 3 * COUNT + 1, "in_memory": 0, "missing": 0, "damaged": 0, "foreign": 0}
    assert (
        summary["chunks_encoded"] == 0
    )  # the engine computed none: it could not have answered without the loaded ones
    assert all(chunk["source"] == "loaded" for result in trace["results"] for chunk in result["chunks"])


def test_there_is_one_token_for_each_step(trace: dict[str, Any]) -> None:
    for result in trace["results"]:
        steps = result["steps"]
        assert [step["step"] for step in steps] == list(range(len(steps)))
        assert [step["phase"] for step in steps] == ["prefill"] + ["decode"] * (len(steps) - 1)
        assert all(isinstance(step["token_id"], int) and step["latency_ms"] > 0 for step in steps)
        assert "".join(step["text"] for step in steps) == result["prediction"]
        assert all(step["accepted_drafts"] == 0 for step in steps)
    assert trace["schema_version"] == stage.SCHEMA_VERSION


def check_moves(result: dict[str, Any], resident: int) -> None:
    """Check that an answer's steps tell one story of its chunks: `resident` of them are on the GPU at a time, and
    those that are too short to have a block of their own."""
    prefill, *decodes = result["steps"]
    movable = {name for step in decodes for name in step["evictions"] + step["promotions"]}
    here = {chunk["chunk_id"] for chunk in result["chunks"]}
    assert set(prefill["resident_chunks"]) == here
    assert prefill["promotions"] == prefill["evictions"] == [] and prefill["bytes_moved"] == 0
    for index, step in enumerate(decodes):
        here = (here | set(step["promotions"])) - set(step["evictions"])
        assert set(step["resident_chunks"]) == here and len(here & movable) <= resident
        assert len(here) == len(decodes[0]["resident_chunks"]) >= resident
        assert (step["bytes_moved"] > 0) == bool(step["evictions"] if index == 0 else step["promotions"])
        if index > 0:
            assert step["proxy_scores"].keys() == {chunk["chunk_id"] for chunk in result["chunks"]}


def test_the_chunks_that_stage_2_marked_are_on_the_gpu_first_and_others_are_promoted(
    built: Stages, trace: dict[str, Any]
) -> None:
    for result in trace["results"]:
        check_moves(result, 2)
        first = result["steps"][1]
        marked = {chunk["chunk_id"] for chunk in result["chunks"] if chunk["placement"] == "gpu"}
        assert set(first["resident_chunks"]) >= marked and first["promotions"] == []
    assert any(result["steps"][1]["evictions"] for result in trace["results"])
    output = built.decode(passages="all", resident_chunks=3)
    for result in output["results"]:
        check_moves(result, 3)
    summary, steps = output["summary"], [step for result in output["results"] for step in result["steps"]]
    assert summary["promotions"] == sum(len(step["promotions"]) for step in steps) > 0
    assert summary["evictions"] == sum(len(step["evictions"]) for step in steps) > summary["promotions"]
    assert summary["bytes_moved"] == sum(step["bytes_moved"] for step in steps) > 0


def test_where_chunks_are_changes_no_answer_unless_they_are_hidden(built: Stages) -> None:
    plain = built.decode(passages="all", offload_mode="none")
    assert plain["summary"]["promotions"] is None
    for result in plain["results"]:
        names = [chunk["chunk_id"] for chunk in result["chunks"]]
        assert all(step["resident_chunks"] == names for step in result["steps"])
        for key in ("promotions", "evictions", "bytes_moved", "proxy_scores"):
            assert all(step[key] is None for step in result["steps"])
    tokens = [[step["token_id"] for step in result["steps"]] for result in plain["results"]]
    exact = built.decode(passages="all", resident_chunks=1)
    assert tokens == [[step["token_id"] for step in result["steps"]] for result in exact["results"]]
    hidden = built.decode(passages="all", resident_chunks=1, offload_mode="resident")
    third = [output["results"][1]["steps"][3]["proxy_scores"] for output in (exact, hidden)]
    assert third[0].keys() == third[1].keys() and third[0] != third[1]  # what is not seen changes what is asked next


def test_accepted_drafts_are_counted(built: Stages) -> None:
    plain, output = built.decode(passages="all"), built.decode(passages="all", draft_tokens=6)
    for result, before in zip(output["results"], plain["results"], strict=True):
        assert result["prediction"] == before["prediction"]
        tokens = sum(1 + step["accepted_drafts"] for step in result["steps"])
        assert tokens == len(before["steps"])
    steps = [step for result in output["results"] for step in result["steps"]]
    assert output["summary"]["accepted_drafts"] == sum(step["accepted_drafts"] for step in steps) > 0


def test_kv_is_evicted_by_head(built: Stages, capsys: pytest.CaptureFixture[str]) -> None:
    plain = built.decode(passages="all", offload_mode="none")
    whole = built.decode(passages="all", offload_mode="none", enable_kvc=True)
    assert [r["prediction"] for r in whole["results"]] == [r["prediction"] for r in plain["results"]]
    assert whole["summary"]["kvs_evicted"] == 0 and plain["summary"]["kvs_evicted"] is None
    half = built.decode(passages="all", offload_mode="none", enable_kvc=True, target_compression_rate=0.5)
    assert half["summary"]["kvs_evicted"] > 0
    assert all(result["error"] is None for result in half["results"])
    with pytest.raises(SystemExit):
        stage.main(["--enable-kvc", "--max-cache-tokens", "64"])
    assert "enable_kvc needs offload_mode none, not exact" in capsys.readouterr().err


def test_a_timeline_is_drawn(built: Stages, tmp_path: Path) -> None:
    built.decode(output=str(tmp_path / "t.json"), max_samples=2, timeline=True)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_timeline_without_matplotlib_is_refused_before_anything_runs(
    built: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = ["--retrieval-json", str(built.retrieval.output_path), "--model-id", MODEL, "--timeline"]
    with pytest.raises(SystemExit) as ended:
        stage.main([*flags, "--load-cache-dir", str(built.chunks), "--output", str(tmp_path / "t.json")])
    assert ended.value.code == 1 and "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_the_answers_are_those_of_the_engine(built: Stages, trace: dict[str, Any]) -> None:
    llm = LLM(MODEL, enable_blending=True, blend_recompute_ratio=0.15, blend_encoding_context="prefix")
    stage_input = read_stage_input(built.retrieval, "", 0)
    params = SamplingParams(temperature=0, max_tokens=stage_input.asking.max_tokens, stop=["\n"])
    for sample, result in zip(stage_input.samples, trace["results"], strict=True):
        chunks = sorted(sample.best(9), key=lambda chunk: chunk.position)
        prompt: ChunkedPrompt = {
            "prefix": stage_input.asking.prefix,
            "chunks": [chunk.text for chunk in chunks],
            "suffix": stage_input.asking.suffix(sample.sample.question),
        }
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert output.outputs[0].text == result["prediction"] and output.outputs[0].text
        assert output.outputs[0].token_ids == [step["token_id"] for step in result["steps"]]
        assert [chunk["chunk_id"] for chunk in result["chunks"]] == [chunk.chunk_id for chunk in chunks]
        assert output.blend is not None
        assert result["blend"]["num_recomputed_tokens"] == output.blend.num_recomputed_tokens


def test_a_free_order_goes_by_the_retrievals_scores(
    built: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passages that it did not find have none."""
    prompts, add_request = [], LLMEngine.add_request

    def record(engine: LLMEngine, request_id: str, prompt: Any, *arguments: Any, **options: Any) -> None:
        prompts.append(prompt)
        add_request(engine, request_id, prompt, *arguments, **options)

    monkeypatch.setattr(LLMEngine, "add_request", record)
    options: dict[str, Any] = {"passages": "all", "order": "free", "offload_mode": "none", "max_tokens": 1}
    output = built.decode(**options)
    retrieved = json.loads(built.retrieval.output_path.read_text())["results"]
    for prompt, result, found in zip(prompts, output["results"], retrieved, strict=True):
        scores = dict(zip(found["retrieved_indices"], found["retrieved_indices_score"], strict=True))
        assert prompt["relevance"] == [scores.get(index) for index in range(len(prompt["chunks"]))]
        assert None in prompt["relevance"] and result["error"] is None
        assert prompt["order"] == "free" and result["blend"]["selector"] == "question_attention"
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(demo_samples(1)))
    with pytest.raises(ValueError, match=r"order free needs the retrieval's scores, but .*plain.json has none for"):
        built.decode(**options, retrieval_json=str(plain))


def test_pages_are_stored_and_found_in_any_order(built: Stages, tmp_path: Path) -> None:
    """A chunk has one KV, whether or not a prompt has what precedes it on its page."""
    stages = Stages.over(tmp_path, demo_samples(1))
    stored = stages.build(pages=True)
    options: dict[str, Any] = {"pages": True, "offload_mode": "none", "blend_selector": "none", "max_tokens": 1}
    given = stages.decode(passages="all", **options)
    free = stages.decode(passages="all", order="free", **options)
    few = stages.decode(**options)
    for output in (given, free, few):
        counts = output["summary"]["chunks"]
        assert counts["loaded"] > 3 and counts["missing"] == counts["damaged"] == counts["foreign"] == 0
        assert output["summary"]["chunks_encoded"] == 0
    exact = [output["results"][0]["blend"]["num_exact_tokens"] for output in (given, free)]
    first_page = stored["samples"][0]["chunks"][:2]
    assert exact[0] == stored["prefix"]["tokens"] + sum(chunk["tokens"] for chunk in first_page)
    assert exact[1] != exact[0]  # another page stands first
    with pytest.raises(ValueError, match=r"pages=False, but .* was written with pages=True: run both stages with the"):
        stages.decode()
    with pytest.raises(ValueError, match="order free needs offload_mode none, not exact"):
        built.decode(order="free")


def test_placements_are_those_of_stage_2(built: Stages, trace: dict[str, Any]) -> None:
    summary = json.loads((built.chunks / "musique_t_kv_top2.json").read_text())
    for described, result in zip(summary["samples"], trace["results"], strict=True):
        wanted = {chunk["chunk_id"]: chunk["placement"] for chunk in described["chunks"]}
        assert sorted(chunk["placement"] for chunk in result["chunks"]) == ["cpu", "gpu", "gpu"]
        assert all(chunk["placement"] == wanted[chunk["chunk_id"]] for chunk in result["chunks"])


def test_all_passages_and_other_settings(built: Stages) -> None:
    output = built.decode(passages="all", blend_selector="none", max_tokens=1, max_samples=1)
    [result] = output["results"]
    assert len(result["chunks"]) == len(demo_samples(1)[0]["ctxs"]) and len(result["steps"]) == 1
    assert result["blend"]["selector"] == "none" and result["blend"]["num_chunks"] == len(result["chunks"])


def test_what_cannot_be_used_is_computed_again_with_the_same_answer(
    built: Stages, trace: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(built.root, tmp_path / "copy")
    stages = Stages(tmp_path / "copy")
    first, second, third = (chunk["chunk_id"] for chunk in trace["results"][0]["chunks"])
    shutil.rmtree(stages.chunks / first)
    data = bytearray((stages.chunks / second / "keys.pt").read_bytes())
    data[-100] ^= 1
    (stages.chunks / second / "keys.pt").write_bytes(data)
    shutil.rmtree(stages.chunks / third)
    shutil.copytree(stages.chunks / "musique_t_prefix", stages.chunks / third)
    with caplog.at_level(logging.WARNING):
        output = stages.decode()
    counts = output["summary"]["chunks"]
    assert (counts["missing"], counts["damaged"], counts["foreign"], counts["loaded"]) == (1, 1, 1, 3 * COUNT - 2)
    assert output["summary"]["chunks_encoded"] == 3
    assert [chunk["source"] for chunk in output["results"][0]["chunks"]] == ["missing", "damaged", "foreign"]
    assert all(name in caplog.text for name in (first, second, third))
    steps = output["results"][0]["steps"]
    assert steps[0]["phase"] == "encode" and steps[0]["token_id"] is None and steps[0]["resident_chunks"] == []
    for result, before in zip(output["results"], trace["results"], strict=True):
        assert result["prediction"] == before["prediction"]


def test_other_kv_in_the_folders_changes_the_answers(built: Stages, tmp_path: Path) -> None:
    """The proof that folders are read: KV of zeros, stored as if it were right, ruins what is only reused."""
    shutil.copytree(built.root, tmp_path / "copy")
    stages = Stages(tmp_path / "copy")
    engine = LLM(MODEL, enable_blending=True, blend_encoding_context="prefix").llm_engine
    stage_input = read_stage_input(stages.retrieval, "", 0)
    for sample in stage_input.samples:
        _, ids = engine.identify_chunks(stage_input.asking.prefix, [chunk.text for chunk in sample.best(9)])
        for chunk, chunk_id in zip(sample.best(9), ids, strict=True):
            kv = load_chunk(stages.chunks / chunk.chunk_id, chunk_id, engine.fingerprint)
            zeros = ChunkKV(kv.k * 0, kv.v * 0)
            write_chunk(stages.chunks / chunk.chunk_id, chunk_id, zeros, engine.fingerprint)
    output = stages.decode(blend_selector="none")
    plain = built.decode(blend_selector="none", output=str(tmp_path / "plain.json"))
    assert output["summary"]["chunks"] == plain["summary"]["chunks"] and output["summary"]["failed"] == 0
    tokens = [[[step["token_id"] for step in r["steps"]] for r in o["results"]] for o in (output, plain)]
    assert tokens[0] != tokens[1]


def test_a_sample_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    samples = demo_samples(2)
    samples[0]["ctxs"][0]["text"] = samples[0]["question"] + " A lens." * 600
    stages = Stages.over(tmp_path, samples)
    stages.build()
    output = stages.decode()
    bad, good = output["results"]
    assert "max_model_len" in bad["error"] and bad["prediction"] == "" and bad["f1"] == 0
    assert good["error"] is None and good["prediction"] and output["summary"]["failed"] == 1
    assert output["summary"]["scores"][-1]["samples"] == 2


def test_mistakes_end_the_command_with_a_message(
    built: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ["--retrieval-json", str(built.retrieval.output_path), "--model-id", MODEL]
    for flags, message in (
        (["--load-cache-dir", str(tmp_path)], "bash scripts/build_kv_cache.sh"),
        (["--load-cache-dir", str(built.chunks), "--blend-selector", "nonsense"], "nonsense"),
    ):
        with pytest.raises(SystemExit) as ended:
            stage.main([*known, *flags, "--output", str(tmp_path / "t.json")])
        assert ended.value.code == 1 and message in capsys.readouterr().err
        assert not (tmp_path / "t.json").exists()
    with pytest.raises(SystemExit) as ended:
        stage.main(["--blend-recompute-ratio", "1.5"])
    assert ended.value.code == 2 and "use a number from 0 to 1" in capsys.readouterr().err


def test_when_no_sample_can_be_answered_the_stage_fails(tmp_path: Path) -> None:
    [sample] = demo_samples(1)
    sample["ctxs"][0]["text"] = sample["question"] + " A lens." * 600
    stages = Stages.over(tmp_path, [sample])
    stages.build()
    with pytest.raises(ValueError, match=r"no sample could be answered; musique_s-000: .*max_model_len"):
        stages.decode()


def test_a_broken_summary_says_which_stage_to_run(tmp_path: Path) -> None:
    (tmp_path / "musique_t_kv_top2.json").write_text('{"samples": [{}]}')
    with pytest.raises(ValueError, match="run that stage again"):
        stage.Placements.read(Path(tmp_path), "musique_t")


def test_a_name_with_brackets_finds_its_summary(tmp_path: Path) -> None:
    (tmp_path / "mine [1]_kv_top2.json").write_text('{"samples": [{"id": "a", "chunks": []}]}')
    assert stage.Placements.read(Path(tmp_path), "mine [1]").by_sample == {"a": {}}
