"""What is sent of a request in pieces, and read at any time, makes up what a request in one process gives."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tests.engine.tiny_tokenizers import byte_level
from vllm_blend import RequestOutput, SamplingParams
from vllm_blend.detokenizer import Detokenizer
from vllm_blend.engine.async_request import AsyncRequest
from vllm_blend.engine.output_processor import OutputProcessor
from vllm_blend.engine.process.deltas import DeltaReporter
from vllm_blend.engine.process.messages import FromEngine, Outputs, new_encoder
from vllm_blend.engine.requests import RequestGroup
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.outputs import Logprob, RequestMetrics
from vllm_blend.request import Request
from vllm_blend.sampling_params import RequestOutputKind

PROMPT = ParsedPrompt([1, 2, 3], "abc")
DECODER = msgspec.msgpack.Decoder(FromEngine)
Steps = list[list[int]]  # the tokens of each step, one list for a completion


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_level()


def group_of(params: SamplingParams, texts: bool) -> RequestGroup:
    """A request as an engine has it; without texts as the engine's own process has it."""
    metrics = RequestMetrics(0.0)
    requests = [Request("r", PROMPT.token_ids, params, metrics, index) for index in range(params.n)]
    for request in requests:
        request.detokenizer = Detokenizer(tokenizer() if texts else None, params, PROMPT.token_ids)
    return RequestGroup("r", PROMPT, metrics, requests)


def entries(token: int, params: SamplingParams) -> dict[int, Logprob] | None:
    return None if params.logprobs is None else {token: Logprob(-token / 7, 1), token + 1: Logprob(-9.0, 2)}


def enter(group: RequestGroup, processor: OutputProcessor, steps: list[Steps], ends: list[str]) -> Any:
    """Enter the tokens of each step, of which the last ends its completion; yield after every step."""
    for at, step in enumerate(steps):
        for request, tokens in zip(group.requests, step, strict=True):
            for place, token in enumerate(tokens):
                if request.finished:
                    break
                last = place == len(tokens) - 1 and not any(later[request.index] for later in steps[at + 1 :])
                stop = (ends[request.index], None) if last else None
                request.output_token_ids.append(token)
                assert request.params is not None
                processor.enter_token(request, token, entries(token, request.params), stop, 1.0)
        yield


@st.composite
def runs(draw: st.DrawFn) -> tuple[SamplingParams, list[Steps], list[str]]:
    n = draw(st.integers(1, 3))
    token = st.integers(0, len(tokenizer()) - 2)
    step = st.lists(st.lists(token, max_size=3), min_size=n, max_size=n)
    steps = draw(st.lists(step, min_size=1, max_size=8))
    steps.append([[draw(token)] for _ in range(n)])
    own = [token for step in steps for token in step[0]]
    pair = st.integers(0, len(own) - 1).map(lambda at: str(tokenizer().decode(own[at : at + 2])))
    piece = st.builds(lambda text, start: text[start:], pair, st.integers(0, 2))  # of the first completion
    params = SamplingParams(
        n=n,
        stop=draw(st.lists(piece.filter(bool), max_size=2)),
        min_tokens=draw(st.integers(0, 4)),
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 1])),
    )
    return params, steps, [draw(st.sampled_from(["stop", "length"])) for _ in range(n)]


@settings(max_examples=150)
@given(runs(), st.data())
def test_deltas_make_up_the_whole(run: tuple[SamplingParams, list[Steps], list[str]], data: st.DataObject) -> None:
    params, steps, ends = run
    processor = OutputProcessor(tokenizer(), 4096)
    whole = group_of(params, texts=True)
    for _ in enter(whole, processor, steps, ends):
        pass
    expected = processor.output(whole)
    reads = data.draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))

    for kind in RequestOutputKind:
        outputs = asyncio.run(read_all(params, kind, steps, ends, reads))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        if kind is RequestOutputKind.DELTA:
            check_deltas(outputs, expected)
        else:
            assert outputs[-1].outputs == expected.outputs


async def read_all(
    params: SamplingParams, kind: RequestOutputKind, steps: list[Steps], ends: list[str], reads: list[bool]
) -> list[RequestOutput]:
    """Send every step of an engine's process, and read after some of them."""
    processor = OutputProcessor(tokenizer(), 4096)
    asked = SamplingParams(**(vars(params) | {"output_kind": kind}))
    request = AsyncRequest(5, "r", PROMPT, asked, 0.0, processor)
    tokens_only = SamplingParams(**(vars(params) | {"stop": None, "detokenize": False}))
    engine, reporter = group_of(tokens_only, texts=False), DeltaReporter()
    report = reporter.watch(5, PROMPT, params.n)
    found: list[RequestOutput] = []

    async def read() -> None:
        while request.has_news and not (found and found[-1].finished):
            found.append(await request.read())

    for wanted, _ in zip(reads, enter(engine, OutputProcessor(None, 4096), steps, ends), strict=True):
        report(engine)
        message = DECODER.decode(new_encoder().encode(reporter.take()))
        assert isinstance(message, Outputs)
        pieces = [piece for delta in message.deltas for piece in delta.pieces(1)]
        request.arrived.extend([*pieces, *((token, message.time) for token in message.token_ids)])
        assert len(message.deltas) + len(message.singles) == 1
        while request.arrived:
            stopped, num_logprobs = request.enter_arrived()
            assert num_logprobs <= 2 * max(len(tokens) for step in steps for tokens in step)
            for index in stopped:  # as the engine does when it hears of it
                if not engine.requests[index].finished:
                    engine.requests[index].finish("stop")
        if wanted:
            await read()
    await read()
    assert reporter.ended == [5] or request.finished
    return found


def check_deltas(outputs: list[RequestOutput], expected: RequestOutput) -> None:
    for completion in expected.outputs:
        parts = [part for output in outputs for part in output.outputs if part.index == completion.index]
        assert "".join(part.text for part in parts) == completion.text
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == list(completion.logprobs or ())
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [completion.finish_reason]
        assert (parts[-1].stop_reason, parts[-1].cumulative_logprob) == (
            completion.stop_reason,
            completion.cumulative_logprob,
        )
    assert all(output.outputs for output in outputs)
