"""The engine against transformers, whatever way the tokens take through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.compare import assert_greedy_tokens, assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import (
    BLOCK_SIZE,
    DEMO,
    TINY_VOCABULARY,
    demo_prompt,
    engine,
    greedy,
    hf_model,
    ids_of,
    new_llm,
    pages_for,
    run,
    sampled,
    threads,
    tiny_model,
    tokens_of,
)
from tests.models.tiny import FAMILIES
from vllm_blend import LLM

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mistral-window": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {},
    **{family: {} for family in FAMILIES},
}
WAYS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "plain torch": {"attention_backend": "torch_native"},
    "small pieces": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "small pieces, plain torch": {
        "max_num_batched_tokens": 7,
        "max_num_seqs": 5,
        "attention_backend": "torch_native",
        "enable_prefix_caching": False,
    },
    "pages for one request": pages_for(96),
    "pages for one request, small pieces": {**pages_for(96), "max_num_batched_tokens": 11, "max_num_seqs": 5},
    "one by one": {"max_num_seqs": 1},
}


def random_prompts(count: int = 5) -> list[Any]:
    """Prompts of 1 to 60 tokens, some with a common beginning."""
    random = torch.Generator().manual_seed(3)
    lengths = [37, 1, 60, 18, 45, 5, 33][:count]
    shared = torch.randint(TINY_VOCABULARY, (64,), generator=random)
    prompts = []
    for index, length in enumerate(lengths):
        ids = torch.randint(TINY_VOCABULARY, (length,), generator=random)
        if index % 2:
            ids[: length // 2] = shared[: length // 2]
        prompts.append({"prompt_token_ids": ids.tolist()})
    return prompts


def tiny(name: str) -> str:
    return tiny_model(name.split("-")[0], **MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs(name: str) -> None:
    params = greedy(20, logprobs=4, prompt_logprobs=2, ignore_eos=True)
    reference = hf_model(tiny(name))
    with engine(tiny(name)) as llm:
        for output in run(llm, random_prompts(), params):
            assert len(output.outputs[0].token_ids) == 20
            assert_greedy_tokens(output, reference)
            assert_logprobs_match(output, reference)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_every_way_through_the_engine(name: str, way: str) -> None:
    """Chunked prefill, prefix hits, preemption: the log-probabilities stay those of one plain forward pass."""
    params = greedy(25, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    with engine(tiny(name), **WAYS[way]) as llm:
        for output in run(llm, random_prompts(), params):
            assert len(output.outputs[0].token_ids) == 25
            assert_logprobs_match(output, hf_model(tiny(name)))
        assert (llm.llm_engine.scheduler.num_preemptions > 0) == ("pages for one request" in way)


@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.cpu_only)])
def test_the_demo_model(num_threads: int) -> None:
    reference = hf_model(DEMO)
    with engine(max_num_batched_tokens=256) as llm, threads(num_threads):
        prompts = [{"prompt_token_ids": ids_of(llm, demo_prompt(index))} for index in range(3)]
        outputs = run(llm, prompts, greedy(10, logprobs=3, prompt_logprobs=0))
        for output in outputs:
            assert_greedy_tokens(output, reference)
            assert_logprobs_match(output, reference)
            tokens = output.outputs[0].token_ids
            assert output.outputs[0].finish_reason == ("stop" if reference.config.eos_token_id in tokens else "length")


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, 32])
def test_a_second_run_takes_its_prefix_from_the_cache(block_size: int) -> None:
    params = greedy(6, logprobs=3, ignore_eos=True)
    with engine(tiny("llama"), block_size=block_size) as llm:
        first = run(llm, random_prompts(), params)
        again = run(llm, random_prompts(), params)
        for before, after in zip(first, again, strict=True):
            n = len(before.prompt_token_ids)
            assert before.num_cached_tokens == 0
            assert after.num_cached_tokens == (n - 1) // block_size * block_size
            assert_same_logprobs(before, after)
            assert_logprobs_match(after, hf_model(tiny("llama")))
        llm.reset_prefix_cache()
        assert [output.num_cached_tokens for output in run(llm, random_prompts(), params)] == [0] * 5


def test_outputs_are_cached_like_prompts() -> None:
    """A conversation goes on: what was generated is found again as part of the next prompt."""
    with engine(tiny("llama"), block_size=BLOCK_SIZE) as llm:
        [first] = run(llm, random_prompts(1), greedy(12, ignore_eos=True))
        longer = [*first.prompt_token_ids, *first.outputs[0].token_ids, 5, 6]
        [second] = run(llm, [{"prompt_token_ids": longer}], greedy(6, logprobs=3, ignore_eos=True))
        assert second.num_cached_tokens == (len(longer) - 3) // BLOCK_SIZE * BLOCK_SIZE
        assert second.num_cached_tokens > (len(first.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert_logprobs_match(second, hf_model(tiny("llama")))


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    """Reported once per token, although part of the prompt is computed twice."""
    arguments = {**pages_for(96), "max_num_batched_tokens": 9, "max_num_seqs": 4}
    prompts = [{"prompt_token_ids": [7 + i] * 12} for i in range(3)] + random_prompts(3)[2:]
    params = [greedy(60, logprobs=1, ignore_eos=True)] * 3 + [
        greedy(20, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    ]
    with engine(tiny("llama"), **arguments) as llm:
        inner = llm.llm_engine
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            inner.add_request(str(index), prompt, own, final_only=True)
        finished = {}
        halfway_preempted = False
        while inner.has_unfinished_requests():
            running = {request.request_id: request.num_computed_tokens for request in inner.scheduler.running}
            for output in inner.step():
                finished[output.request_id] = output
            waiting = {request.request_id for request in inner.scheduler.waiting}
            halfway_preempted |= "3" in waiting and 0 < running.get("3", 0) < 60
        assert halfway_preempted
        for output in finished.values():
            assert_logprobs_match(output, hf_model(tiny("llama")))


def test_a_preempted_request_does_not_count_its_own_pages_as_hits() -> None:
    arguments = {**pages_for(96), "max_num_batched_tokens": 9, "max_num_seqs": 4}
    prompts = [{"prompt_token_ids": [7 + i] * 12} for i in range(3)] + [{"prompt_token_ids": [*range(60)]}]
    with engine(tiny("llama"), **arguments) as llm:
        before = counters(llm)
        outputs = run(llm, prompts, greedy(30, ignore_eos=True))
        assert llm.llm_engine.scheduler.num_preemptions > 0
        assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0]
        after = counters(llm)
        gained = {name: after[name] - before.get(name, 0) for name in after}
        assert gained["vllm:prompt_tokens"] == gained["vllm:prefix_cache_queries"] == 3 * 12 + 60
        assert gained["vllm:prefix_cache_hits"] == 0
        assert gained["vllm:generation_tokens"] == 4 * 30
        assert gained["vllm:request_success_length"] == 4


def counters(llm: LLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics()}


def drawn(**options: Any) -> Any:
    return sampled(12, ignore_eos=True, logprobs=0, **options)


def test_several_completions_of_a_prompt() -> None:
    with engine(tiny("llama")) as llm:
        [output] = run(llm, random_prompts(1), drawn(n=4, seed=11, prompt_logprobs=0))
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(each) for each in tokens_of([output])}) == 4
        assert_logprobs_match(output, hf_model(tiny("llama")))
        [again] = run(llm, random_prompts(1), drawn(n=4, seed=11))
        assert_same_logprobs(again, output)
        [alone] = run(llm, random_prompts(1), drawn(seed=11))
        output.outputs = output.outputs[:1]
        assert_same_logprobs(alone, output)


def test_engine_seeds_make_unseeded_draws_repeatable() -> None:
    prompts = random_prompts(3)
    engines = [new_llm(tiny("llama"), seed=seed, max_num_seqs=4) for seed in (1, 1, 2)]
    outputs = [tokens_of(run(llm, prompts, drawn())) for llm in engines]
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("way", ["whole prompts", "small pieces", "pages for one request"])
def test_a_batch_equals_its_requests_alone(way: str) -> None:
    prompts = random_prompts()
    greedily = [greedy(n, logprobs=0, ignore_eos=n > 4) for n in (20, 4)]
    params = [greedily[0], drawn(seed=1), drawn(seed=2, n=2), drawn(seed=3, top_k=5), greedily[1]]
    with engine(tiny("qwen3"), **WAYS[way]) as llm:
        together = run(llm, prompts, params)
        for prompt, own, output in zip(prompts, params, together, strict=True):
            [alone] = run(llm, [prompt], own)
            assert_same_logprobs(alone, output)


def test_a_context_ends_where_the_model_does() -> None:
    with engine(tiny("llama")) as llm:
        [output] = run(llm, [{"prompt_token_ids": [5] * 90}], greedy(50, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 6
        assert output.outputs[0].finish_reason == "length"


def test_outputs_carry_their_times_in_order() -> None:
    with engine(tiny("llama")) as llm:
        for output in run(llm, random_prompts(), greedy(5)):
            metrics = output.metrics
            assert metrics is not None
            times = [
                metrics.arrival_time,
                metrics.first_scheduled_time,
                metrics.first_token_time,
                metrics.last_token_time,
                metrics.finished_time,
            ]
            known = [time for time in times if time is not None]
            assert known == sorted(known)
            assert len(known) == 5
            assert metrics.time_in_queue == known[1] - known[0]
