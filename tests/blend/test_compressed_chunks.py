"""Chunks stored with a share of their KVs: what is kept, what a prompt over them computes, and what it gives back."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.blend.compressed_reference import CompressedReference
from tests.blend.prompts import assert_counts_add_up, plain, recomputed_positions, tiny_prompt
from tests.chunks.llms import chunked_llm, random_ids
from tests.engine.compare import (
    assert_identical,
    assert_logprobs_match,
    assert_same_choice,
    assert_same_logprobs,
    blend_of,
    check_entries,
)
from tests.engine.engines import (
    BLOCK_SIZE,
    engine,
    greedy,
    hf_model,
    new_llm,
    pages_for,
    run,
    sampled,
    tiny_model,
    tokens_of,
)
from vllm_blend import LLM, RequestOutput
from vllm_blend.blend.selectors import SELECTORS, Selector, register_selector
from vllm_blend.engine.arg_utils import EngineArgs

pytestmark = pytest.mark.cpu_only  # which KVs are kept is compared with float64: half precision may keep others

TINY = tiny_model("llama")
PARAMS = greedy(12, logprobs=2, ignore_eos=True)
RULES: list[dict[str, Any]] = [
    {"blend_selector": "none"},
    {"blend_selector": "random", "blend_recompute_ratio": 0.3},
    {"blend_selector": "first_tokens", "blend_recompute_ratio": 0.2},
    {"blend_selector": "question_attention", "blend_recompute_ratio": 0.15},
    {"blend_selector": "question_attention", "blend_recompute_ratio": 0.5},
    {"blend_selector": "question_attention(tokens=2)", "blend_recompute_ratio": 0.3},
    {"blend_selector": "full"},
]


def settings_of(share: float, **more: Any) -> dict[str, Any]:
    return {
        "enable_blending": True,
        "enable_kvc": True,
        "blend_chunk_kept_share": share,
        "block_size": BLOCK_SIZE,
    } | more


def num_stored(llm: LLM) -> int:
    return llm.llm_engine.chunk_store.num_bytes


@cache
def reference() -> CompressedReference:
    return CompressedReference(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64).eval())


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_all_of_each_chunk_answers_as_whole_chunks_do(rule: dict[str, Any], architecture: str) -> None:
    model = tiny_model(architecture)
    prompts = [tiny_prompt(**rule), tiny_prompt(**rule, prefix=[]), tiny_prompt(**rule, in_place_chunks=[1, 2])]
    with engine(model, enable_blending=True, block_size=BLOCK_SIZE) as llm:
        expected = run(llm, prompts, PARAMS)
    with engine(model, **settings_of(1.0)) as llm:
        for output, whole in zip(run(llm, prompts, PARAMS), expected, strict=True):
            assert_same_logprobs(output, whole)
            assert blend_of(output) == blend_of(whole)


@pytest.mark.parametrize("rule", [RULES[0], RULES[1], RULES[3], RULES[4], RULES[6]], ids=str)
@pytest.mark.parametrize(("metric", "share"), [("keydiff", 0.5), ("knorm", 0.25), ("keydiff", 0.07)])
def test_answers_are_those_of_a_plain_forward_with_the_rest_masked(
    rule: dict[str, Any], metric: str, share: float
) -> None:
    prompt = tiny_prompt(**rule)
    backend = "torch_native" if share == 0.25 else "auto"
    with engine(TINY, **settings_of(share, blend_chunk_metric=metric, attention_backend=backend)) as llm:
        [output] = run(llm, prompt, PARAMS)
        chosen = recomputed_positions(llm, len(prompt["suffix"]))
    check_against_reference(output, prompt, metric, share, chosen)


def check_against_reference(
    output: RequestOutput, prompt: dict[str, Any], metric: str, share: float, chosen: torch.Tensor
) -> None:
    assert_counts_add_up(output)
    plainly = reference()
    context = plainly.compose(prompt["prefix"], prompt["chunks"])
    sizes = [len(prompt["prefix"]), *map(len, prompt["chunks"])]
    context = replace(context, candidates=torch.arange(len(context.ids)) >= sizes[0])  # a part of a chunk is not exact
    kept = plainly.kept(context, sizes, metric, share)
    if prompt["blend_selector"] == "question_attention":
        budget = int(prompt["blend_recompute_ratio"] * len(context.ids))
        best, _ = plainly.best(context, kept, prompt["suffix"], budget)
        assert_same_choice(chosen.tolist(), best.tolist())
    [answer] = output.outputs
    expected = plainly.logprobs(context, kept, prompt["suffix"], chosen, answer.token_ids)
    assert answer.logprobs is not None
    check_entries(answer.logprobs, answer.token_ids, expected)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("metric", ["keydiff", "knorm", "random", "streaming_llm"])
def test_the_store_holds_the_share(metric: str, share: float) -> None:
    prompt = tiny_prompt()
    with engine(TINY, enable_blending=True) as llm:
        [whole] = llm.encode_chunks(prompt["prefix"], prompt["chunks"][2:3])
    with engine(TINY, **settings_of(share, blend_chunk_metric=metric)) as llm:
        [kv] = llm.encode_chunks(prompt["prefix"], prompt["chunks"][2:3])
        [prefix], [chunk] = [llm.llm_engine.identify_chunks(prompt["prefix"], prompt["chunks"][2:3])[0]], [kv]
        assert prefix is not None and llm.llm_engine.chunk_store.get(prefix.key).positions is None, "it stays whole"
        assert num_stored(llm) == chunk.nbytes + llm.llm_engine.chunk_store.get(prefix.key).nbytes
    num_kept = math.ceil(share * whole.num_tokens)
    assert kv.num_kvs == num_kept and kv.num_tokens == whole.num_tokens and kv.is_sound
    assert kv.k.nbytes * whole.num_tokens == whole.k.nbytes * num_kept
    assert kv.positions is not None
    at = kv.positions.long()[..., None].expand(-1, -1, -1, whole.k.shape[-1])
    assert torch.equal(kv.k, whole.k.gather(1, at)) and torch.equal(kv.v, whole.v.gather(1, at))
    if metric == "streaming_llm":
        assert torch.equal(kv.positions[:, 0], torch.full_like(kv.positions[:, 0], whole.num_tokens - num_kept))


@pytest.mark.parametrize("how", ["auto", "int8", "fp8"])
def test_another_process_finds_them_on_the_disk(tmp_path: Path, how: str) -> None:
    prompts = [tiny_prompt(**rule) for rule in RULES[:4]]
    on_disk = {"chunk_store_path": str(tmp_path), "chunk_store_format": how}
    first = new_llm(TINY, **settings_of(0.5, **on_disk))
    expected = run(first, prompts, PARAMS)
    assert first.llm_engine.composer.num_encoded > 0
    first.llm_engine.chunk_store.close()
    again = []
    for _ in range(2):
        llm = new_llm(TINY, **settings_of(0.5, **on_disk))
        again.append(run(llm, prompts, PARAMS))
        assert llm.llm_engine.composer.num_encoded == 0
        llm.llm_engine.chunk_store.close()
    for one, two, fresh in zip(*again, expected, strict=True):
        assert_same_logprobs(one, two)
        if how == "auto":
            assert_same_logprobs(one, fresh)
    for other in (settings_of(0.25), settings_of(0.5, blend_chunk_metric="knorm"), {"enable_blending": True}):
        llm = new_llm(TINY, **(other | on_disk))
        run(llm, prompts[:1], PARAMS)
        assert llm.llm_engine.composer.num_encoded == 3, "the prefix is the same, the three chunks are others"
        llm.llm_engine.chunk_store.close()


@pytest.mark.parametrize("damage", ["order", "range", "number", "length"])
def test_what_the_disk_gives_back_is_checked(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    prompt = tiny_prompt(blend_selector="none")
    first = new_llm(TINY, **settings_of(0.5, chunk_store_path=str(tmp_path)))
    [expected] = run(first, prompt, PARAMS)
    _, chunks = first.llm_engine.identify_chunks(prompt["prefix"], prompt["chunks"])
    kv = first.llm_engine.chunk_store.get(chunks[2].key)
    assert kv is not None and kv.positions is not None and kv.length is not None
    positions = kv.positions.clone()
    if damage == "order":
        positions[1, :2] = positions[1, :2].flip(0)
    elif damage == "range":
        positions[1, -1, 0] = kv.length
    bad = replace(kv, positions=positions, length=kv.length + (damage == "length"))
    if damage == "number":
        bad = replace(bad, k=kv.k[:, 1:], v=kv.v[:, 1:], positions=positions[:, 1:].contiguous())
    first.llm_engine.chunk_store.remove(chunks[2].key)
    first.llm_engine.chunk_store.put(chunks[2].key, bad)
    first.llm_engine.chunk_store.close()
    second = new_llm(TINY, **settings_of(0.5, chunk_store_path=str(tmp_path)))
    with caplog.at_level(logging.WARNING):
        [output] = run(second, prompt, PARAMS)
    assert second.llm_engine.composer.num_encoded == 1
    assert f"stored chunk {chunks[2].key} not used" in caplog.text
    assert_same_logprobs(output, expected)
    second.llm_engine.chunk_store.close()


def mixture() -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = [tiny_prompt(**rule) for rule in RULES]
    prompts[2]["suffix"] = prompts[2]["suffix"][:3]
    prompts[3]["prefix"] = []
    return [prompts[0], plain(prompts[1]), *prompts[1:]]


@pytest.mark.parametrize(("known", "ahead"), [(False, False), (True, False), (True, True)])
def test_a_batch_equals_its_requests_alone(known: bool, ahead: bool) -> None:
    params = [PARAMS if i % 3 else sampled(9, seed=i, logprobs=1) for i in range(len(mixture()))]
    with engine(TINY, **settings_of(0.5, async_scheduling=ahead)) as llm:
        alone = [run(llm, prompt, own)[0] for prompt, own in zip(mixture(), params, strict=True)]
        if not known:
            llm.llm_engine.chunk_store.clear()
            llm.reset_prefix_cache()
        for expected, output in zip(alone, run(llm, mixture(), params), strict=True):
            assert_same_logprobs(output, expected)
            assert blend_of(output) == blend_of(expected)


def test_prompts_that_do_not_fit_wait_and_running_ones_are_preempted() -> None:
    prompts = [tiny_prompt(**rule) for rule in RULES for _ in range(2)]
    with engine(TINY, **settings_of(0.5)) as llm:
        alone = [run(llm, prompt, greedy(30, logprobs=1, ignore_eos=True))[0] for prompt in prompts]
    with engine(TINY, **settings_of(0.5, **pages_for(96))) as llm:
        together = run(llm, prompts, greedy(30, logprobs=1, ignore_eos=True))
        assert llm.llm_engine.scheduler.num_preemptions > 0
        for output, expected in zip(together, alone, strict=True):
            assert_same_logprobs(output, expected)
            assert blend_of(output) == blend_of(expected)


def test_a_preempted_prompt_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for rule in RULES:
        with engine(TINY, **settings_of(0.5)) as llm:
            [expected] = run(llm, tiny_prompt(**rule), PARAMS)
            inner = llm.llm_engine
            inner.add_request("0", tiny_prompt(**rule), PARAMS)  # type: ignore[arg-type]
            for step in range(10):
                if step == 5:
                    inner.scheduler.preempt_last()
                inner.step()
            [output] = finished(llm)
            assert_same_logprobs(output, expected)


def finished(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += [output for output in llm.llm_engine.step() if output.finished]
    return outputs


def test_aborts_give_all_pages_back() -> None:
    with engine(TINY, **settings_of(0.5)) as llm:
        inner = llm.llm_engine
        for steps in range(4):
            for index, rule in enumerate(RULES):
                inner.add_request(str(index), tiny_prompt(**rule), PARAMS)  # type: ignore[arg-type]
            for _ in range(steps):
                inner.step()
            inner.abort_request([str(index) for index in range(len(RULES))])
            assert inner.kv_compression is not None and inner.kv_compression.pool.num_used_pages == 0


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_arrivals_and_aborts_by_chance_leave_every_page_free(runs_ahead: bool) -> None:
    rng = random.Random(5)
    evicting: dict[str, Any] = {"kvc_metric": "knorm", "protected_window_size": 6, "num_sinks": 1, "kvc_interval": 4}
    settings = settings_of(0.3, **evicting, **pages_for(160) | {"async_scheduling": runs_ahead})
    with engine(TINY, **settings) as llm:
        inner, live, num_finished = llm.llm_engine, set[str](), 0
        for step in range(400):
            if len(live) < 8 and rng.random() < 0.3:
                prompt: Any = tiny_prompt(**rng.choice(RULES))
                kept = rng.choice([{}, {}, {"max_cache_tokens": 20}, {"target_compression_rate": 0.5}])
                params = greedy(rng.randrange(1, 25), ignore_eos=True, **kept)
                inner.add_request(str(step), rng.choice([prompt, prompt, plain(prompt)]), params)
                live.add(str(step))
            if live and rng.random() < 0.03:
                name = rng.choice(sorted(live))
                inner.abort_request(name)
                live.discard(name)
            for output in inner.step():
                assert output.error is None
                num_finished += output.finished
                live -= {output.request_id} if output.finished else set()
        inner.abort_request(sorted(live))
        assert not inner.has_unfinished_requests() or not finished(llm)
        assert num_finished > 40 and inner.scheduler.num_preemptions > 5
        assert inner.kv_compression is not None and inner.kv_compression.pool.num_used_pages == 0


def test_a_step_that_fails_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tiny_prompt(**RULES[3])
    with engine(TINY, **settings_of(0.5)) as llm:
        [expected] = run(llm, prompt, PARAMS)
        inner = llm.llm_engine
        prefill = inner.model_executor.driver_worker.model_runner.compressed_prefill
        assert prefill is not None

        def fails(*_: Any) -> None:
            raise RuntimeError("no such luck")

        inner.add_request("0", prompt, PARAMS)  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(prefill, "_choose", fails)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="no such luck"):
                    inner.step()
        [output] = finished(llm)
        assert_same_logprobs(output, expected)


def test_several_completions_and_repeated_prompts() -> None:
    with engine(TINY, **settings_of(0.5)) as llm:
        [output] = run(llm, tiny_prompt(**RULES[3]), sampled(6, n=3, seed=4, logprobs=1))
        singles = [run(llm, tiny_prompt(**RULES[3]), sampled(6, seed=4 + i, logprobs=1))[0] for i in range(3)]
        assert tokens_of([output]) == tokens_of(singles)
        first, second = run(llm, [tiny_prompt(**RULES[4])] * 2, PARAMS)
        assert_same_logprobs(first, second)


@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=str)
def test_their_kv_is_evicted_like_that_of_any_request(rule: dict[str, Any]) -> None:
    evicting: dict[str, Any] = {
        "kvc_metric": "knorm",
        "max_cache_tokens": 16,
        "protected_window_size": 6,
        "num_sinks": 1,
        "kvc_interval": 4,
    }
    with engine(TINY, **settings_of(1.0, **evicting)) as llm:
        before = llm.llm_engine.kv_compression.engine.num_evicted  # type: ignore[union-attr]
        one, two = (run(llm, tiny_prompt(**rule), PARAMS)[0] for _ in range(2))
        assert llm.llm_engine.kv_compression.engine.num_evicted > before  # type: ignore[union-attr]
        assert_identical(one, two)
        [beside, *_] = run(llm, [tiny_prompt(**rule), tiny_prompt(**RULES[1]), plain(tiny_prompt())], PARAMS)
        assert_same_logprobs(beside, one)


@pytest.mark.parametrize("prefix", [[], [4, 5, 6]])
def test_all_computed_again_is_full_prefill(prefix: list[int]) -> None:
    with engine(TINY, **settings_of(0.25)) as llm:
        for rule in (RULES[-1], {"blend_selector": "question_attention", "blend_recompute_ratio": 1.0}):
            [output] = run(llm, tiny_prompt(**rule, prefix=prefix), PARAMS)
            assert_counts_add_up(output)
            assert_logprobs_match(output, hf_model(TINY))


def test_auto_is_a_rule_that_goes_with_compressed_chunks() -> None:
    with engine(TINY, **settings_of(0.5, blend_selector="auto")) as llm:
        prompts = [tiny_prompt(), tiny_prompt(blend_selector="question_attention")]
        output, expected = (run(llm, prompt, PARAMS)[0] for prompt in prompts)
    assert blend_of(output) == blend_of(expected) and output.blend is not None
    assert output.blend.selector == "question_attention"
    assert_same_logprobs(output, expected)


@pytest.mark.parametrize("selector", ["first_tokens", "value_deviation", "question_attention"])
def test_registered_chunks_stay_whole(selector: str) -> None:
    """And prompts of them are computed in ordinary pages, which are retained."""
    answers = []
    for settings in ({}, {"enable_kvc": True, "blend_chunk_kept_share": 0.5}):
        with chunked_llm(**settings) as chunked:
            chunks = [chunked.register_chunk(random_ids(n, n)).id for n in (9, 21)]
            ask = {"query": random_ids(5, 1), "selector": selector, "sampling_params": PARAMS}
            answers.append([chunked.generate_from_chunks(None, chunks, **ask) for _ in range(2)])
    for expected, output in zip(*answers, strict=True):
        assert_same_logprobs(output, expected)
        assert blend_of(output) == blend_of(expected)


def test_chunks_computed_earlier_are_taken_back() -> None:
    prompt = tiny_prompt(**RULES[3])
    with engine(TINY, **settings_of(0.5)) as llm:
        [expected] = run(llm, prompt, PARAMS)
        kvs = llm.encode_chunks(prompt["prefix"], prompt["chunks"])
        _, chunks = llm.llm_engine.identify_chunks(prompt["prefix"], prompt["chunks"])
        llm.llm_engine.chunk_store.clear()
        before = llm.llm_engine.composer.num_encoded
        for chunk, kv in zip(chunks, kvs, strict=True):
            llm.load_chunk(chunk, kv)
        [output] = run(llm, prompt, PARAMS)
        assert llm.llm_engine.composer.num_encoded == before + 1, "the prefix"
        assert_same_logprobs(output, expected)
    with engine(TINY, enable_blending=True) as llm, pytest.raises(ValueError, match="blend_chunk_kept_share"):
        _, whole = llm.llm_engine.identify_chunks(prompt["prefix"], prompt["chunks"])
        llm.load_chunk(whole[0], kvs[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blend_chunk_kept_share": 0.0}, r"blend_chunk_kept_share=0\.0 .* \(0, 1\]"),
        ({"blend_chunk_kept_share": 1.5}, r"blend_chunk_kept_share=1\.5"),
        ({"blend_chunk_kept_share": True}, "blend_chunk_kept_share=True"),
        ({"blend_chunk_metric": "snapkv"}, "blend_chunk_metric='snapkv': .* keydiff, knorm"),
        ({"blend_chunk_metric": "guess"}, "blend_chunk_metric='guess'"),
        ({"enable_kvc": False}, r"blend_chunk_kept_share=0\.5.* enable_kvc=True"),
        ({"enable_blending": False}, r"blend_chunk_kept_share=0\.5, but the engine does not blend"),
        ({"blend_controller": True}, "blend_controller exclude each other"),
        ({"max_cache_tokens": 64}, "kvc_metric='kv_compress' .* keydiff"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("nowhere", **(settings_of(0.5) | arguments)).create_engine_config()


@pytest.mark.parametrize(
    "rule",
    [
        "value_deviation",
        "gradual",
        "attention_deviation",
        "question_attention + mean_shift",
        "question_attention(first_round=0.5)",
        "question_attention(over_heads=max)",
    ],
)
def test_rules_that_cannot_choose_are_refused(rule: str) -> None:
    message = "blend_selector=.* and blend_chunk_kept_share exclude each other"
    with pytest.raises(ValueError, match=message):
        new_llm(TINY, **settings_of(0.5, blend_selector=rule))
    with engine(TINY, **settings_of(0.5)) as llm:
        with pytest.raises(ValueError, match=message):
            llm.llm_engine.add_request("0", tiny_prompt(blend_selector=rule), PARAMS)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="kvc_metric='kv_compress'"):
            evicting = greedy(4, target_compression_rate=0.5)
            llm.llm_engine.add_request("0", tiny_prompt(), evicting)  # type: ignore[arg-type]


def test_a_rule_that_fails_costs_its_own_request_alone() -> None:
    class Failing(Selector):
        name = "failing"

        def score(self, evidence: Any) -> torch.Tensor:
            raise RuntimeError("out of ideas")

    register_selector(Failing)
    try:
        with engine(TINY, **settings_of(0.5)) as llm:
            [expected] = run(llm, tiny_prompt(**RULES[3]), PARAMS)
            bad, good = run(llm, [tiny_prompt(blend_selector="failing"), tiny_prompt(**RULES[3])], PARAMS)
            assert bad.error is not None and "out of ideas" in bad.error
            assert_same_logprobs(good, expected)
    finally:
        del SELECTORS["failing"]
