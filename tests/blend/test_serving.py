"""Blended requests among others: batches, preemption, eviction, aborts, duplicated and shared chunks."""

from __future__ import annotations

from typing import Any

import pytest

from tests import settings
from tests.blend.prompts import assert_counts_add_up, plain, tiny_prompt
from tests.engine.compare import assert_same_choice, assert_same_logprobs, blend_of
from tests.engine.engines import (
    TINY_VOCABULARY,
    demo_prompt,
    engine,
    greedy,
    pages_for,
    run,
    sampled,
    tiny_model,
    tokens_of,
)
from tests.models.tiny import HEAD_DIM
from vllm_blend import LLM, RequestOutput

TINY = tiny_model("llama")
PARAMS = greedy(12, logprobs=2, ignore_eos=True)
RULES = ["value_deviation", "question_attention", "question_attention(mean_shift=0)", "first_tokens", "random", "none"]


def prompt_of(index: int, rule: str, ratio: float | None = 0.3) -> dict[str, Any]:
    """Prompts that share some chunks, in other places, and differ in the rest."""
    ids = [(13 * i * i + 7 * i + 3) % TINY_VOCABULARY for i in range(120)]
    library = [ids[5:17], ids[17:20], ids[20:41], ids[41:52], ids[60:78]]
    chunks = [library[(index + step) % len(library)] for step in (0, 2, 3)]
    options: dict[str, Any] = {"blend_selector": rule}
    if rule != "none" and ratio is not None:
        options["blend_recompute_ratio"] = ratio
    return {"prefix": ids[:5], "chunks": chunks, "suffix": ids[90 + index : 96 + 2 * index], **options}


def mixture() -> list[dict[str, Any]]:
    """Blended prompts of every rule, and plain ones between them."""
    prompts = []
    for index, rule in enumerate(RULES):
        prompts.append(prompt_of(index, rule))
        if index % 2:
            prompts.append(plain(prompt_of(index + 1, rule)))
    return prompts


@pytest.mark.parametrize("backend", settings.current().backends)
@pytest.mark.parametrize("known", [False, True])
def test_a_batch_equals_its_requests_alone(backend: str, known: bool) -> None:
    """Blended by any rule or plain, greedy or seeded; whether the chunks are new or stored."""
    with engine(TINY, enable_blending=True, attention_backend=backend) as llm:
        params = [PARAMS if i % 3 else sampled(9, seed=i, logprobs=1) for i in range(len(mixture()))]
        alone = [run(llm, prompt, own)[0] for prompt, own in zip(mixture(), params, strict=True)]
        if not known:
            llm.llm_engine.chunk_store.clear()
            llm.reset_prefix_cache()
        for expected, output in zip(alone, run(llm, mixture(), params), strict=True):
            assert_same_logprobs(output, expected)
            assert blend_of(output) == blend_of(expected)


def test_a_batch_of_demo_questions_equals_them_alone() -> None:
    prompts: list[Any] = [
        demo_prompt(i, blend_selector=rule) for i, rule in enumerate(["question_attention", "value_deviation"])
    ]
    with engine(enable_blending=True) as llm:
        alone = [run(llm, prompt, greedy(8, logprobs=1))[0] for prompt in prompts]
        for expected, output in zip(alone, run(llm, prompts, greedy(8, logprobs=1)), strict=True):
            assert_same_logprobs(output, expected)
            assert blend_of(output) == blend_of(expected)


@pytest.mark.parametrize("rule", RULES)
def test_a_preempted_blend_gives_the_same_output(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that were generated are computed again, and the same context tokens are chosen as the first time."""
    params = [greedy(30, logprobs=2, ignore_eos=True)] * 3
    prompts = [prompt_of(index, rule) for index in range(3)]
    with engine(TINY, enable_blending=True) as roomy:
        expected = run(roomy, prompts, params)
        assert roomy.llm_engine.scheduler.num_preemptions == 0
    with engine(TINY, enable_blending=True, **pages_for(120)) as tight:
        chosen: dict[str, list[list[int]]] = {}
        inner: Any = tight.llm_engine
        record = inner.results.record_blend

        def recorded(request: Any, result: Any) -> None:
            chosen.setdefault(request.request_id, []).append(result.computed.tolist())
            record(request, result)

        counted = inner.metrics.blended_prompts
        with monkeypatch.context() as patch:
            patch.setattr(inner.results, "record_blend", recorded)
            outputs = run(tight, prompts, params)
        assert inner.scheduler.num_preemptions > 0
        assert inner.metrics.blended_prompts == counted + 3, "what is computed again is the same prompt"
        assert max(map(len, chosen.values())) > 1, "no blended request was preempted"
        for first, *again in chosen.values():
            for each in again:
                assert_same_choice(first, each)
        for before, after in zip(expected, outputs, strict=True):
            assert_same_logprobs(before, after)
            assert blend_of(before) == blend_of(after)


@pytest.mark.parametrize("kib", [0.01, 8, 20])
def test_eviction_changes_the_cost_and_nothing_else(kib: float) -> None:
    """The store holds no chunk, or few: a request that waits for a chunk keeps those that it has found already.

    The sizes are meant for heads of 16 in float32.
    """
    kib *= HEAD_DIM * settings.current().torch_dtype.itemsize / 64
    prompts = [prompt_of(index, rule) for index, rule in enumerate(RULES)]
    with engine(TINY, enable_blending=True) as roomy:
        expected = run(roomy, prompts, PARAMS)
        encoded = roomy.llm_engine.composer.num_encoded
    with engine(TINY, enable_blending=True, blend_chunk_cache_gib=kib / 2**20) as tight:
        for _ in range(2):
            for before, after in zip(expected, run(tight, prompts, PARAMS), strict=True):
                assert_same_logprobs(before, after)
                assert blend_of(before) == blend_of(after)
        store = tight.llm_engine.chunk_store
        assert store.num_bytes <= kib * 1024
        for prompt, before in zip(prompts, expected, strict=True):
            assert_same_logprobs(run(tight, prompt, PARAMS)[0], before)
        assert tight.llm_engine.composer.num_encoded > 2 * 6
        assert encoded >= 6


def test_requests_share_the_encoding_of_a_chunk() -> None:
    with engine(TINY, enable_blending=True) as llm:
        before = llm.llm_engine.composer.num_encoded
        prompts = [prompt_of(0, "none"), {**prompt_of(0, "none"), "suffix": [9, 8, 7]}, prompt_of(0, "first_tokens")]
        run(llm, prompts, PARAMS)
        assert llm.llm_engine.composer.num_encoded - before == 1 + 3  # the prefix and three chunks
        run(llm, prompts, PARAMS)
        assert llm.llm_engine.composer.num_encoded - before == 1 + 3


def test_a_chunk_is_found_again_wherever_it_stands() -> None:
    with engine(TINY, enable_blending=True) as llm:
        prompt = prompt_of(0, "none")
        run(llm, prompt, PARAMS)
        before = llm.llm_engine.composer.num_encoded
        reordered = {**prompt, "chunks": prompt["chunks"][::-1] + prompt["chunks"][:1], "suffix": [1, 2, 3]}
        [output] = run(llm, reordered, PARAMS)
        assert llm.llm_engine.composer.num_encoded == before
        assert_counts_add_up(output)
        assert output.blend is not None
        assert output.blend.num_chunks == 4
        assert output.blend.num_recomputed_tokens == 3


def test_another_prefix_means_other_chunks() -> None:
    with engine(TINY, enable_blending=True) as llm:
        prompt = prompt_of(0, "none")
        run(llm, prompt, PARAMS)
        before = llm.llm_engine.composer.num_encoded
        run(llm, {**prompt, "prefix": [4, 4]}, PARAMS)
        assert llm.llm_engine.composer.num_encoded - before == 1 + 3


@pytest.mark.parametrize("rule", [*RULES, "full"])
def test_counts_add_up_to_the_prompt(rule: str) -> None:
    with engine(TINY, enable_blending=True) as llm:
        for index in range(4):
            prompt = prompt_of(index, rule, 1.0 if rule == "full" else 0.3)
            assert_counts_add_up(run(llm, prompt, PARAMS)[0])
            [output] = run(llm, prompt, PARAMS)
            assert_counts_add_up(output)
            assert output.blend is not None and output.blend.num_encoded_tokens == 0
            first = len(prompt["prefix"]) + len(prompt["chunks"][0])
            context = len(output.prompt_token_ids) - len(prompt["suffix"])
            assert output.blend.num_exact_tokens == first
            expected = {"none": 0, "full": context - first}.get(rule, int(0.3 * context))
            assert output.blend.num_recomputed_tokens == min(expected, context - first) + len(prompt["suffix"])


def steps(llm: LLM, count: int) -> list[RequestOutput]:
    return [output for _ in range(count) for output in llm.llm_engine.step()]


def finish(llm: LLM) -> dict[str, RequestOutput]:
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = output
    return done


@pytest.mark.parametrize("after", range(7))
def test_abort_at_any_moment(after: int) -> None:
    """While its chunks are encoded, before it runs, while it decodes: the others go on, and the pages come back."""
    prompts = mixture()
    with engine(TINY, enable_blending=True, max_num_batched_tokens=40, max_num_seqs=4) as llm:
        expected = run(llm, prompts, PARAMS)
        llm.llm_engine.chunk_store.clear()
        llm.reset_prefix_cache()
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(index), prompt, PARAMS)  # type: ignore[arg-type]
        steps(llm, after)
        llm.llm_engine.abort_request(["0", "3", "5", "unknown"])
        done = finish(llm)
        assert sorted(done, key=int) == [str(i) for i in range(len(prompts)) if i not in (0, 3, 5)]
        for request_id, output in done.items():
            assert_same_logprobs(output, expected[int(request_id)])
        assert_same_logprobs(run(llm, prompts[0], PARAMS)[0], expected[0])


def test_an_interrupted_call_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: the next call sees an engine as good as new."""
    prompts = mixture()
    with engine(TINY, enable_blending=True, max_num_batched_tokens=40, max_num_seqs=4) as llm:
        expected = run(llm, prompts, PARAMS)
        for stop_after in (0, 1, 3, 6):
            llm.llm_engine.chunk_store.clear()
            llm.reset_prefix_cache()
            execute = llm.llm_engine.model_executor.execute_model
            calls: list[Any] = []

            def interrupted(output: Any, calls: list[Any] = calls, at: int = stop_after, execute: Any = execute) -> Any:
                calls.append(output)
                if len(calls) > at:
                    raise KeyboardInterrupt
                return execute(output)

            with monkeypatch.context() as patch:
                patch.setattr(llm.llm_engine.model_executor, "execute_model", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    run(llm, prompts, PARAMS)
            for output, before in zip(run(llm, prompts, PARAMS), expected, strict=True):
                assert_same_logprobs(output, before)


def test_several_completions_share_a_plan() -> None:
    options: dict[str, Any] = {"seed": 5, "logprobs": 0, "ignore_eos": True}
    with engine(TINY, enable_blending=True) as llm:
        prompt = prompt_of(1, "question_attention")
        [output] = run(llm, prompt, sampled(8, n=3, **options))
        assert len({tuple(tokens) for tokens in tokens_of([output])}) == 3
        [alone] = run(llm, prompt, sampled(8, **options))
        output.outputs = output.outputs[:1]
        assert_same_logprobs(alone, output)
        assert blend_of(alone) == blend_of(output)
        assert_counts_add_up(output)


def test_encoding_counts_towards_the_time_of_the_request_that_needs_it() -> None:
    """The first step that works for a prompt may be one that encodes its chunks."""
    with engine(TINY, enable_blending=True) as llm:
        llm.llm_engine.add_request("a", prompt_of(0, "none"), PARAMS)  # type: ignore[arg-type]
        assert steps(llm, 2) == []  # prefix, then chunks
        [output] = list(finish(llm).values())
        assert output.metrics is not None
        assert output.metrics.first_scheduled_time is not None
        assert output.metrics.first_token_time is not None
        assert output.metrics.first_scheduled_time < output.metrics.first_token_time


def test_min_tokens_counts_the_context() -> None:
    context = len(plain(tiny_prompt())["prompt_token_ids"]) - len(tiny_prompt()["suffix"])
    for minimum, blended in ((context, True), (context + 1, False)):
        with engine(TINY, enable_blending=True, blend_min_tokens=minimum) as llm:
            assert (run(llm, tiny_prompt(), PARAMS)[0].blend is not None) == blended
