"""Chunks that move while the engine decodes: in mode "exact" nothing shows, in mode "resident" just what is away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import tolerances
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import (
    DEMO,
    demo_prompt,
    end_moves,
    engine,
    feature,
    greedy,
    hf_model,
    ids_of,
    new_llm,
    pages_for,
    run,
    sampled,
    tiny_model,
)
from vllm_blend import LLM, ChunkedPrompt
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.features.offload.predictors import PREDICTORS, PromotionEvidence, PromotionPredictor, register_predictor
from vllm_blend.features.offload.residency import movable_blocks

pytestmark = pytest.mark.cpu_only  # small pages, and placements that tests predict

SIZE = 8
EXACT: dict[str, Any] = {"offload_mode": "exact", "block_size": SIZE, "enable_blending": True}
RESIDENT: dict[str, Any] = {"offload_mode": "resident", "block_size": SIZE, "offload_predictor": "retrieval_rank"}
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5}
FAST = settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))


class Restless(PromotionPredictor):
    """Wants other chunks all the time, and looks at the queries of steps with chunks away."""

    name = "restless"
    uses_queries = True
    generator = torch.Generator().manual_seed(7)

    def score(self, evidence: PromotionEvidence) -> torch.Tensor:
        assert evidence.expected_mass is not None and not evidence.expected_mass.isnan().any()
        return torch.rand(len(evidence.ranks), generator=self.generator)


@pytest.fixture(autouse=True, scope="module")
def _restless() -> Iterator[None]:
    register_predictor(Restless)
    yield
    del PREDICTORS["restless"]


def assert_host_empty(llm: LLM) -> None:
    offload = feature(llm.llm_engine, ChunkOffload)
    scheduler = offload.scheduler
    end_moves(llm)
    assert scheduler.host.num_free_blocks == scheduler.host.num_blocks
    assert (
        not scheduler._tracked and not offload.scorer._memory and not offload._queries and not offload._placed_by_rank
    )


def plainly(prompts: list[ChunkedPrompt], params: Any, **arguments: Any) -> list[Any]:
    with engine(block_size=SIZE, **({"enable_blending": True} | arguments)) as llm:
        return run(llm, [{k: v for k, v in p.items() if k != "chunk_ranking"} for p in prompts], params)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the device": {"offload_device_fraction": 1.0, "offload_predictor": "retrieval_rank"},
    "all on the host": {"offload_device_fraction": 0.0, "offload_predictor": "retrieval_rank"},
    "random": {"offload_device_fraction": 0.5, "offload_predictor": "retrieval_rank"},  # as random rankings say
    "moving": {"offload_device_fraction": 0.4, "offload_predictor": "restless"},
    "by the queries": {"offload_device_fraction": 0.2, "offload_predictor": "query_digest"},
}


def logits_of(llm: LLM, prompts: list[ChunkedPrompt], params: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Outputs, and the logits [rows, vocabulary] of every step."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    compute, seen = model.compute_logits, []

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden).clone())
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "compute_logits", recording)
        return run(llm, prompts, params), seen


@FAST
@given(data=st.data())
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_placement_does_not_change_the_logits(backend: str, placement: str, data: st.DataObject) -> None:
    """Mode "exact": all on the device, all on the host, placed at random, moving, and moving by what is asked. Every
    step of every placement has the logits of an engine whose chunks do not move, alone and in batches."""
    samples = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), label="samples")
    ranking = data.draw(st.permutations(range(6)), label="ranking")
    prompts = [demo_prompt(index, 6) for index in samples]
    params = greedy(8, logprobs=2, ignore_eos=True)
    with engine(block_size=SIZE, enable_blending=True, attention_backend=backend) as llm:
        plain, wanted = logits_of(llm, prompts, params)
    asked = [prompt | {"chunk_ranking": ranking} for prompt in prompts]
    with engine(**EXACT, **PLACEMENTS[placement], attention_backend=backend) as llm:
        scheduler = feature(llm.llm_engine, ChunkOffload).scheduler
        before = scheduler.num_evictions, scheduler.num_promotions
        outputs, logits = logits_of(llm, asked, params)
        assert_host_empty(llm)
        evicted, promoted = (
            now - then for now, then in zip((scheduler.num_evictions, scheduler.num_promotions), before, strict=True)
        )
    assert len(logits) == len(wanted)
    for ours, theirs in zip(logits, wanted, strict=True):
        tolerances.check("logits", ours - theirs)
    for left, right in zip(outputs, plain, strict=True):
        assert_same_logprobs(left, right)
    assert (evicted > 0) == (placement != "all on the device")
    assert promoted > 0 or placement != "moving"


def test_moving_placement_moves() -> None:
    with engine(**EXACT, offload_predictor="restless") as llm:
        before = feature(llm.llm_engine, ChunkOffload).scheduler.num_promotions
        run(llm, demo_prompt(0, 6), greedy(12, ignore_eos=True))
        assert feature(llm.llm_engine, ChunkOffload).scheduler.num_promotions >= before + 3


@pytest.mark.parametrize("mode", ["exact", "resident"])
def test_running_ahead_preemption_and_completions_leave_nothing_behind(mode: str) -> None:
    """Few pages, so that requests are preempted with chunks away; several completions; steps queued ahead."""
    arguments: dict[str, Any] = {"enable_blending": True, "offload_mode": mode, "offload_predictor": "query_digest"}
    arguments |= {"offload_device_fraction": 0.3, "async_scheduling": True, "max_model_len": 512}
    prompts = [demo_prompt(index, 4) for index in range(4)]
    params = sampled(60, n=2, seed=3, logprobs=1, ignore_eos=True)
    with engine(**arguments, **pages_for(560)) as llm:
        outputs = run(llm, prompts, params)
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert_host_empty(llm)
        gauges = {metric.name: metric.value for metric in llm.get_metrics()}
        assert gauges["vllm_blend:chunk_evictions"] > 0 and gauges["vllm_blend:offload_bytes_moved"] > 0
    if mode == "exact":
        for left, right in zip(outputs, plainly(prompts, params, max_model_len=512), strict=True):
            assert_same_logprobs(left, right)


@pytest.mark.parametrize("predictor", ["query_digest", "restless"])
def test_drafts_are_verified_with_chunks_away(predictor: str) -> None:
    """Several rows of a request in a step, all of them behind the blocks that are missing."""
    prompts, params = [demo_prompt(index, 6) for index in range(3)], greedy(24, logprobs=3, ignore_eos=True)
    llm = new_llm(**EXACT, offload_predictor=predictor, speculative_config=SPECULATIVE)
    for left, right in zip(run(llm, prompts, params), plainly(prompts, params), strict=True):
        assert_same_logprobs(left, right)
    gauges = {metric.name: metric.value for metric in llm.get_metrics()}
    assert sum(value for name, value in gauges.items() if "accepted" in name) > 0
    assert gauges["vllm_blend:chunk_promotions"] > 0
    assert_host_empty(llm)


def test_an_aborted_request_gives_everything_back() -> None:
    with engine(**EXACT) as llm:
        inner = llm.llm_engine
        offload = feature(inner, ChunkOffload)
        host = offload.scheduler.host
        inner.add_request("a", demo_prompt(0, 6), greedy(20, ignore_eos=True))
        while "a" not in offload.reports:
            inner.step()
        assert len(offload.reports["a"].evictions) == 4  # 2 of 6 stay
        assert host.num_free_blocks < host.num_blocks
        inner.abort_request("a")
        assert_host_empty(llm)


def test_resident_mode_sees_what_is_on_the_device() -> None:
    """Against transformers with a mask: rows after the prompt do not see the blocks that are away."""
    prompt = demo_prompt(0, 5)
    prompt["chunk_ranking"] = [3, 1]
    with engine(**RESIDENT, offload_resident_chunks=2) as llm:
        [output] = run(llm, prompt, greedy(10, logprobs=5, ignore_eos=True))
        ids, bounds = ids_of(llm, prompt), _bounds(llm, prompt)
    n, total = len(ids), len(ids) + 10
    seen = torch.ones(total, total, dtype=torch.bool).tril()
    away = [block for c in (0, 2, 4) for block in movable_blocks(*bounds[c], SIZE)]
    assert len(away) >= 6
    for block in away:
        seen[n:, block * SIZE : (block + 1) * SIZE] = False
    completion = output.outputs[0]
    mask = torch.zeros(total, total).masked_fill(~seen, float("-inf"))[None, None]
    with torch.inference_mode():
        logits = hf_model(DEMO)(torch.tensor([[*ids, *completion.token_ids]]), attention_mask=mask).logits[0]
    expected = logits.float().log_softmax(-1)[n - 1 : -1]
    differences = [
        logprob.logprob - row[token].item()
        for entry, row in zip(completion.logprobs or [], expected, strict=True)
        for token, logprob in entry.items()
    ]
    tolerances.check("logprobs", differences)
    assert completion.token_ids == expected.argmax(-1).tolist()


def _bounds(llm: LLM, prompt: ChunkedPrompt) -> list[tuple[int, int]]:
    start = len(ids_of(llm, {"prefix": prompt["prefix"], "chunks": [], "suffix": []}))
    bounds = []
    for chunk in prompt["chunks"]:
        bounds.append((start, start + len(llm.get_tokenizer().encode(chunk, add_special_tokens=False))))
        start = bounds[-1][1]
    return bounds


def test_what_was_computed_without_some_chunks_is_no_prefix_of_others() -> None:
    """Generated tokens of mode "resident" are not in the exact prefix cache; the prompt is."""
    prompt = demo_prompt(1, 5)
    with engine(**RESIDENT, offload_resident_chunks=0) as llm:
        [first] = run(llm, prompt, greedy(24, ignore_eos=True))
        ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
        [again] = run(llm, {"prompt_token_ids": ids}, greedy(4, logprobs=5))
        assert again.num_cached_tokens is not None
        assert 0 < again.num_cached_tokens <= len(first.prompt_token_ids)
        assert_logprobs_match(again, hf_model(DEMO))


def test_a_ranking_places_first_and_scores_move_later() -> None:
    prompt = demo_prompt(0, 6)
    prompt["chunk_ranking"] = [5, 0]
    with engine(**EXACT, offload_predictor="query_digest", offload_resident_chunks=2) as llm:
        inner = llm.llm_engine
        inner.add_request("a", prompt, greedy(10, ignore_eos=True))
        reports = []
        while inner.has_unfinished_requests():
            inner.step()
            latest = feature(inner, ChunkOffload).reports
            reports += [latest["a"]] if "a" in latest else []
    assert reports[0].resident_chunks == [0, 5] and sorted(reports[0].evictions) == [1, 2, 3, 4]
    assert any(report.promotions for report in reports[1:])
    assert all(len(report.resident_chunks) <= 2 for report in reports)
    assert all(report.scores is not None and len(report.scores) == 6 for report in reports[1:])


@pytest.mark.parametrize("ends", ["finished", "aborted"])
def test_an_idle_engine_holds_no_pages(ends: str) -> None:
    """Neither for a step that was queued ahead of the last request's end, nor for chunks that still travel."""
    options = EXACT | {"offload_predictor": "restless", "offload_resident_chunks": 2, "async_scheduling": True}
    llm = new_llm(DEMO, **options, offload_bytes_per_step=1 << 17)
    inner = llm.llm_engine
    for index in range(3):
        inner.add_request("a", demo_prompt(index, 6), greedy(9, ignore_eos=True))
        for _ in range(8):
            inner.step()
        if ends == "aborted":
            inner.abort_request("a")
        while inner.has_unfinished_requests():
            inner.step()
        assert not feature(inner, ChunkOffload).scheduler.moves
        assert inner.blocks.num_free_blocks == inner.blocks.num_usable_blocks
    assert feature(inner, ChunkOffload).scheduler.num_evictions > 0


def test_mistakes_are_named() -> None:
    prompt = demo_prompt(0, 2)
    with engine() as llm, pytest.raises(ValueError, match="offload_mode"):
        run(llm, prompt | {"chunk_ranking": [0]}, greedy(1))
    with engine(**EXACT) as llm:
        for ranking, error, message in (
            ([0, 2], ValueError, r"chunk_ranking\[1\] is 2"),
            ([1, 1], ValueError, r"chunk_ranking\[1\] is 1"),
            (["a"], TypeError, r"chunk_ranking\[0\] is 'a'"),
            (3, TypeError, "must be a list"),
        ):
            with pytest.raises(error, match=message):
                run(llm, prompt | {"chunk_ranking": ranking}, greedy(1))
    for arguments, message in (
        ({"offload_mode": "magic"}, "offload_mode='magic' is unknown"),
        ({"offload_mode": "exact", "offload_predictor": "oracle"}, "offload_predictor='oracle' is unknown"),
        ({"offload_mode": "exact", "offload_bytes_per_step": 1000}, "offload_bytes_per_step=1000 is below"),
        ({"offload_mode": "exact", "offload_device_fraction": 1.5}, "offload_device_fraction=1.5"),
        ({"offload_mode": "exact", "offload_resident_chunks": -1}, "offload_resident_chunks=-1"),
        ({"offload_mode": "exact", "offload_host_gib": 0}, "offload_host_gib=0"),
    ):
        with pytest.raises(ValueError, match=message):
            new_llm(**arguments)


def test_attention_sinks_and_offload_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="offload_mode='resident': the model has attention sinks"):
        new_llm(tiny_model("gpt_oss", sliding_window=96), offload_mode="resident")


def test_sliding_windows_and_offload_exclude_each_other() -> None:
    model = tiny_model("mistral", sliding_window=16)
    with pytest.raises(ValueError, match="offload_mode='resident': the model has layers with a sliding window"):
        new_llm(model, offload_mode="resident")


def test_many_requests_take_turns_in_being_scored() -> None:
    """Each is scored again within a few steps, and before its chunks first move."""
    prompts = [demo_prompt(index, 4) for index in range(5)]
    with engine(**EXACT, offload_predictor="query_digest") as llm:
        inner, offload = llm.llm_engine, feature(llm.llm_engine, ChunkOffload)
        offload.scored_per_step = 2
        try:
            for index, prompt in enumerate(prompts):
                inner.add_request(str(index), prompt, greedy(12, ignore_eos=True))
            asked = []
            while inner.has_unfinished_requests():
                inner.step()
                asked.append({request.request_id for request in offload._queries})
        finally:
            offload.scored_per_step = None
    full = [names for names in asked if names]
    assert len(full[0]) == 5 and all(len(names) == 2 for names in full[1:-1])
    for start in range(1, len(full) - 4):
        assert len(set().union(*full[start : start + 3])) == 5
