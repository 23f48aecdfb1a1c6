"""`AsyncLLM` gives what `LLM.generate` gives, in streams, and frees what it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.engine.async_engines import async_llm, at_once, comparable, final, is_empty, metrics, runs, stream, until
from tests.engine.engines import ROOT, demo_prompt, engine, run
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.errors import DeadlineError, QueueFullError
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.owners import ANYONE
from vllm_blend.prompt_parser import parse_context
from vllm_blend.sampling_params import RequestOutputKind

MODEL = str(ROOT / "inputs" / "demo-model-reuse")
ARGUMENTS: dict[str, Any] = {
    "model": MODEL,
    "enable_blending": True,
    "blend_encoding_context": "page",  # as `engine` has it
    "scheduling_policy": "priority",
}
QUESTION = "Where is the lamp? Where is the"
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    with async_llm(max_queued_requests=8, max_num_seqs=16, **ARGUMENTS) as made:
        yield made
        asyncio.run(until(lambda: is_empty(made), "all pages are free"))


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with engine(max_num_seqs=16, **ARGUMENTS) as made:
        yield made


@pytest.fixture(autouse=True)
def _begins_empty(llm: AsyncLLM) -> None:
    """Wait for what a test left: a stop string ends a request in the engine a step later, and beside it another one's
    log-probabilities are rounded otherwise."""
    asyncio.run(until(lambda: is_empty(llm), "all pages are free"))


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | options))


KINDS: dict[str, SamplingParams] = {
    "greedy": params(),
    "ends": params(max_tokens=40, min_tokens=3),
    "seeded": params(temperature=1.0, seed=7, top_p=0.9),
    "several": params(temperature=1.0, seed=7, n=3, logprobs=2),
    "stop string": params(stop=["oun", "wa"], max_tokens=30),
    "stop string shown": params(stop=["a"], include_stop_str_in_output=True, max_tokens=30),
    "late stop string": params(stop=["o"], min_tokens=6, max_tokens=30),
    "several with stop strings": params(temperature=1.0, seed=3, n=3, stop=["e", "an"], max_tokens=30),
    "stop token": params(stop_token_ids=[1792], max_tokens=30),
    "log-probabilities": params(logprobs=3, prompt_logprobs=1),
    "flat log-probabilities": params(logprobs=1, prompt_logprobs=0, flat_logprobs=True),
    "no text": params(detokenize=False, logprobs=1),
    "bad words": params(bad_words=["oun", "was"], logit_bias={280: 2.0}, repetition_penalty=1.1),
    "allowed": params(allowed_token_ids=[201, 829, 303], frequency_penalty=0.5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_generate(llm: AsyncLLM, offline: LLM, kind: str) -> None:
    offline.reset_prefix_cache()
    [expected] = run(offline, [QUESTION], KINDS[kind])

    async def both() -> RequestOutput:
        await llm.reset_prefix_cache()
        return await final(llm, QUESTION, KINDS[kind])

    assert comparable(asyncio.run(both())) == comparable(expected)


def test_blended_outputs_are_those_of_generate(llm: AsyncLLM, offline: LLM) -> None:
    """Also the second time, when chunks and blended contexts are found, and the counts that say so."""
    prompts = [
        demo_prompt(0, 5, cache_salt="a"),
        demo_prompt(0, 5, cache_salt="a"),
        demo_prompt(1, 5, cache_salt="a", blend_selector="first_tokens", blend_recompute_ratio=0.3),
        demo_prompt(0, 6, cache_salt="a", relevance=[1, 5, 2, 4, 3, 0], order="free"),
        demo_prompt(0, 5, cache_salt="b", in_place_chunks=[1, 2]),
    ]
    expected = [run(offline, [prompt], params())[0] for prompt in prompts]

    async def streamed() -> list[RequestOutput]:
        return [await final(llm, prompt, params()) for prompt in prompts]

    for output, wanted in zip(asyncio.run(streamed()), expected, strict=True):
        assert comparable(output) == comparable(wanted)
    assert expected[0].blend is not None
    assert expected[3].prompt_token_ids != offline.llm_engine.get_tokenizer()(str(prompts[3])).input_ids


def test_requests_at_once_are_those_alone(llm: AsyncLLM, offline: LLM) -> None:
    prompts: list[Any] = [QUESTION, demo_prompt(2, 4), "The lamp", demo_prompt(3, 4), [0, 57, 877]]
    wanted = [run(offline, [prompt], params())[0] for prompt in prompts]
    outputs = asyncio.run(at_once(llm, prompts, [params()] * len(prompts)))
    for output, expected in zip(outputs, wanted, strict=True):
        assert output.outputs == expected.outputs
        assert output.prompt == expected.prompt


@pytest.mark.parametrize("kind", ["greedy", "several", "several with stop strings", "late stop string", "no text"])
def test_deltas_make_up_the_whole(llm: AsyncLLM, kind: str) -> None:
    asked = KINDS[kind]
    changed = {"output_kind": DELTA}
    deltas = asyncio.run(stream(llm, QUESTION, SamplingParams(**(vars(asked) | changed))))
    whole = asyncio.run(final(llm, QUESTION, asked))
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    for completion in whole.outputs:
        parts = [part for output in deltas for part in output.outputs if part.index == completion.index]
        assert "".join(part.text for part in parts) == completion.text
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [completion.finish_reason]
        assert parts[-1].stop_reason == completion.stop_reason
        if completion.logprobs is not None:
            assert [entry for part in parts for entry in part.logprobs or ()] == list(completion.logprobs)


def test_cumulative_texts_grow_and_final_only_comes_once(llm: AsyncLLM) -> None:
    asked = params(stop=["was a"], max_tokens=30)
    outputs = asyncio.run(stream(llm, QUESTION, asked))
    texts = [output.outputs[0].text for output in outputs]
    assert len(texts) > 1
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    [once] = asyncio.run(stream(llm, QUESTION, SamplingParams(**(vars(asked) | {"output_kind": FINAL_ONLY}))))
    assert once.outputs == outputs[-1].outputs


def test_generate_offline_takes_every_output_kind(offline: LLM) -> None:
    outputs = [run(offline, [QUESTION], params(output_kind=kind))[0] for kind in RequestOutputKind]
    assert outputs[0].outputs == outputs[1].outputs == outputs[2].outputs
    with pytest.raises(ValueError, match="DELTA"):
        offline.llm_engine.add_request("delta", QUESTION, params(output_kind=DELTA))


def test_closing_a_stream_frees_its_pages(llm: AsyncLLM) -> None:
    """The abort and the call for metrics travel in order on one socket, so the first reading is taken after the abort.
    At most one step, which was queued before it came, is still read then."""

    async def leave_early() -> None:
        outputs = llm.generate(QUESTION, endless(n=64), "left")
        await anext(outputs)
        assert not await is_empty(llm)
        await outputs.aclose()
        closed = await metrics(llm)
        await until(lambda: is_empty(llm), "the pages are free")
        freed = await metrics(llm)
        assert freed["vllm_blend:num_steps"] - closed["vllm_blend:num_steps"] <= 1
        assert freed["vllm:request_success_abort"] >= 1

    asyncio.run(leave_early())


def test_abort_ends_a_stream_with_what_there_is(llm: AsyncLLM) -> None:
    async def aborted() -> RequestOutput:
        reading = asyncio.ensure_future(final(llm, QUESTION, endless(n=64), request_id="aborted"))
        await until(lambda: runs(llm), "the request runs")
        await llm.abort(["aborted", "unknown"])
        output = await reading
        await until(lambda: is_empty(llm), "the pages are free")
        return output

    output = asyncio.run(aborted())
    assert output.finished
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}


def test_a_stop_string_ends_one_completion_in_the_engine(llm: AsyncLLM) -> None:
    """The others go on, and when all have ended no page is left. The engine is spared what would have followed."""

    async def run_all() -> tuple[RequestOutput, float]:
        before = await metrics(llm)
        output = await final(llm, QUESTION, endless(n=3, seed=3, stop=["e", "an"]))
        await until(lambda: is_empty(llm), "the pages are free")
        return output, (await metrics(llm))["vllm:generation_tokens"] - before["vllm:generation_tokens"]

    output, num_generated = asyncio.run(run_all())
    assert {completion.stop_reason for completion in output.outputs} <= {"e", "an"}
    assert num_generated < 3 * 900


def test_a_deadline_ends_a_request(llm: AsyncLLM) -> None:
    async def run_late(seconds: float) -> RequestOutput:
        try:
            output = await final(llm, QUESTION, endless(n=8), deadline=time.time() + seconds)
        except DeadlineError:  # a busy machine did not get to its first token
            return await run_late(2 * seconds)
        await until(lambda: is_empty(llm), "the pages are free")
        return output

    output = asyncio.run(run_late(0.5))
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert all(completion.token_ids for completion in output.outputs)


def test_a_request_that_never_began_by_its_deadline_is_an_error(llm: AsyncLLM) -> None:
    async def wait_in_vain() -> None:
        runners = [asyncio.ensure_future(final(llm, QUESTION, endless(n=8))) for _ in range(2)]
        await until(lambda: runs(llm), "others run")
        with pytest.raises(DeadlineError, match="has passed"):
            await final(llm, QUESTION, params(), deadline=time.time() - 1)
        with pytest.raises(DeadlineError, match="no token"):
            await final(llm, QUESTION, params(), deadline=time.time() + 0.1)
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        await until(lambda: is_empty(llm), "the pages are free")

    asyncio.run(wait_in_vain())


def test_a_full_queue_refuses(llm: AsyncLLM) -> None:
    """16 completions may run and 8 wait."""

    async def fill() -> QueueFullError:
        runners = [asyncio.ensure_future(final(llm, QUESTION, endless(n=8))) for _ in range(3)]
        await until(lambda: llm.num_unfinished_requests == 3, "all are queued")
        with pytest.raises(QueueFullError, match="max_queued_requests=8") as caught:
            await final(llm, QUESTION, params())
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        assert (await final(llm, QUESTION, params())).finished
        return caught.value

    assert 1 <= asyncio.run(fill()).retry_after <= 60


def test_requests_that_are_tokenized_at_once_do_not_overfill_the_queue(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is space for three of them, and none is queued yet when they come."""
    monkeypatch.setattr("vllm_blend.engine.async_llm.INLINE_CHARACTERS", 0)

    async def fill() -> list[BaseException]:
        runners = [asyncio.ensure_future(final(llm, QUESTION, endless(n=8))) for _ in range(5)]
        await until(lambda: sum(runner.done() for runner in runners) == 2, "two are refused")
        assert llm.num_unfinished_requests == 3
        for runner in runners:
            runner.cancel()
        return [each for each in await asyncio.gather(*runners, return_exceptions=True) if isinstance(each, Exception)]

    assert [type(error) for error in asyncio.run(fill())] == [QueueFullError] * 2


def test_priority_is_passed_on(llm: AsyncLLM) -> None:
    async def race() -> list[RequestOutput]:
        long = asyncio.ensure_future(final(llm, QUESTION, endless(n=16)))
        await until(lambda: runs(llm), "every place is taken")
        late = asyncio.ensure_future(final(llm, QUESTION, params(), priority=2))
        await until(lambda: llm.num_unfinished_requests == 2, "the late one is queued")
        urgent = asyncio.ensure_future(final(llm, QUESTION, params(), priority=1))
        await until(lambda: llm.num_unfinished_requests == 3, "the urgent one is queued")
        long.cancel()
        return list(await asyncio.gather(late, urgent))

    late, urgent = (output.metrics for output in asyncio.run(race()))
    assert late is not None and urgent is not None
    assert urgent.first_token_time is not None and late.first_token_time is not None
    assert urgent.arrival_time > late.arrival_time
    assert urgent.first_token_time <= late.first_token_time


BAD: dict[str, tuple[Any, SamplingParams, dict[str, Any], str]] = {
    "empty": ([], params(), {}, "cannot be empty"),
    "out of vocabulary": ([10**6], params(), {}, "out of vocabulary"),
    "too long": ([5] * 1024, params(), {}, "max_model_len"),
    "far too long": ("lamp " * 200_000, params(), {}, "more than twice as long"),
    "id": (QUESTION, params(stop_token_ids=[10**6]), {}, "outside the vocabulary"),
    "processors": (QUESTION, params(logits_processors=[lambda ids, row: row]), {}, "functions of this process"),
    "selector": ({"prefix": "a", "chunks": ["b"], "suffix": "c", "blend_selector": "no"}, params(), {}, "no"),
    "logprobs of a blend": (
        {"prefix": "a\n", "chunks": ["b\n"], "suffix": "c"},
        params(prompt_logprobs=1),
        {},
        "blend",
    ),
    "deadline": (QUESTION, params(), {"deadline": float("nan")}, "deadline"),
    "a prompt of the wrong types": (ParsedPrompt([5, 6], blend_selector=3), params(), {}, "cannot be read"),  # type: ignore[arg-type]
}


def test_bad_input_fails_alone(llm: AsyncLLM, offline: LLM) -> None:
    [expected] = run(offline, [QUESTION], params(max_tokens=60))

    async def refuse(case: str) -> str:
        prompt, asked, options, _ = BAD[case]
        with pytest.raises((ValueError, TypeError)) as caught:
            await final(llm, prompt, asked, **options)
        return str(caught.value)

    async def all_at_once() -> tuple[RequestOutput, list[str]]:
        running = asyncio.ensure_future(final(llm, QUESTION, params(max_tokens=60)))
        errors = await asyncio.gather(*map(refuse, BAD))
        with pytest.raises(TypeError, match="SamplingParams"):
            await final(llm, QUESTION, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="request_id"):
            await final(llm, QUESTION, params(), request_id=3)
        return await running, errors

    good, errors = asyncio.run(all_at_once())
    assert good.outputs == expected.outputs
    for error, (_, _, _, part) in zip(errors, BAD.values(), strict=True):
        assert part in error


def test_an_id_is_used_once_at_a_time(llm: AsyncLLM) -> None:
    async def twice() -> None:
        outputs = llm.generate(QUESTION, endless(n=20), "same")
        await anext(outputs)
        with pytest.raises(ValueError, match="'same' is in use"):
            await final(llm, QUESTION, params(), request_id="same")
        await outputs.aclose()
        assert (await final(llm, QUESTION, params(), request_id="same")).finished

    asyncio.run(twice())


def test_methods_of_the_engine_can_be_called(llm: AsyncLLM) -> None:
    async def call() -> None:
        parsed = parse_context("Read.", ["One passage.", "Another one."], llm.get_tokenizer(), llm.vocab_size)
        encoded = await llm.call("encode_chunks", parsed, ANYONE)
        assert [chunk["num_tokens"] for chunk in encoded] == [b - a for a, b in parsed.chunk_bounds]
        asked = {"prefix": "Read.", "chunks": ["One passage.", "Another one."], "suffix": "What?"}
        output = await final(llm, asked, params())
        assert output.blend is not None and output.blend.num_encoded_tokens == 0
        assert await llm.call("flush") is True
        await llm.call("remove_chunks", [chunk["key"] for chunk in encoded])
        with pytest.raises(ValueError, match="encode_chunks"):
            await llm.call("encode")
        with pytest.raises(TypeError, match="takes 2 arguments"):
            await llm.call("encode_chunks")
        with pytest.raises(ValueError, match="Expected"):
            await llm.call("remove_chunks", 3)
        with pytest.raises(ValueError, match="max_model_len"):
            long = parse_context("", [[5] * 2000], llm.get_tokenizer(), llm.vocab_size)
            await llm.call("encode_chunks", long, ANYONE)
        with pytest.raises(ValueError, match="pooling"):
            llm.encode("text")
        await llm.check_health()

    asyncio.run(call())


def endless(**options: Any) -> SamplingParams:
    return params(temperature=1.0, max_tokens=900, ignore_eos=True, **options)
