"""Random traffic through whole engines: whatever arrives when, in however little room, answers stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import settings as run_settings
from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import (
    BLOCK_SIZE,
    TINY_VOCABULARY,
    engine,
    greedy,
    pages_for,
    run,
    sampled,
    tiny_model,
)
from tests.models.tiny import HEAD_DIM
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.blend.selectors import SELECTORS

IDS = [(13 * i * i + 7 * i + 3) % TINY_VOCABULARY for i in range(200)]
LIBRARY = [IDS[a:b] for a, b in ((0, 9), (9, 12), (12, 28), (28, 29), (29, 45))]
PREFIXES = [[], IDS[60:62], IDS[62:75]]
SUFFIXES = [IDS[100:101], IDS[101:104], IDS[104:115]]
RULES = sorted(SELECTORS)
SIZE = HEAD_DIM * run_settings.current().torch_dtype.itemsize / 64  # of stored KV, 1 for heads of 16 in float32
ARRIVAL = st.tuples(
    st.integers(0, 15),  # the step it arrives at
    st.sampled_from([None, *RULES]),  # blended by which rule, or plain
    st.sampled_from([0, 1, 2]),  # prefix
    st.lists(st.integers(0, len(LIBRARY) - 1), min_size=1, max_size=3),  # chunks
    st.sampled_from([0, 1, 2]),  # suffix
    st.sampled_from([1, 2, 9, 20]),  # tokens to generate
    st.sampled_from([None, 1, 2]),  # seed, or greedy
    st.sampled_from([None, None, None, 2, 6]),  # steps after which it is aborted
)


def prompt_of(rule: str | None, prefix: int, chunks: tuple[int, ...], suffix: int) -> dict[str, Any]:
    pieces = [LIBRARY[i] for i in chunks]
    if rule is None:
        context = [*PREFIXES[prefix], *(token for piece in pieces for token in piece)]
        return {"prompt_token_ids": [*context, *SUFFIXES[suffix]]}
    options: dict[str, Any] = {"blend_selector": rule}
    if SELECTORS[rule].fixed_ratio is None:
        options["blend_recompute_ratio"] = 0.3
    return {"prefix": PREFIXES[prefix], "chunks": pieces, "suffix": SUFFIXES[suffix], **options}


def params_of(max_tokens: int, seed: int | None) -> SamplingParams:
    options: dict[str, Any] = {"logprobs": 1, "ignore_eos": True}
    return greedy(max_tokens, **options) if seed is None else sampled(max_tokens, seed=seed, **options)


@cache
def alone(
    model: str, rule: str | None, prefix: int, chunks: tuple[int, ...], suffix: int, max_tokens: int, seed: int | None
) -> RequestOutput:
    with engine(model, enable_blending=True) as llm:
        return run(llm, prompt_of(rule, prefix, chunks, suffix), params_of(max_tokens, seed))[0]


def serve(llm: LLM, arrivals: Sequence[Any]) -> dict[str, RequestOutput]:
    """Add and abort each request (see `ARRIVAL`) at its step. Return the outputs of those that finished by their
    index in `arrivals`."""
    inner = llm.llm_engine
    done: dict[str, RequestOutput] = {}
    step = 0
    while inner.has_unfinished_requests() or step <= 15:
        for index, (at, rule, prefix, chunks, suffix, max_tokens, seed, abort) in enumerate(arrivals):
            if at == step:
                prompt: Any = prompt_of(rule, prefix, tuple(chunks), suffix)
                inner.add_request(str(index), prompt, params_of(max_tokens, seed))
            if abort is not None and at + abort == step:
                inner.abort_request(str(index))
        for output in inner.step():
            assert output.request_id not in done
            if output.finished:
                done[output.request_id] = output
        step += 1
        assert step < 2000
    return done


@pytest.mark.parametrize(
    ("architecture", "overrides", "arguments"),
    [
        ("llama", {}, {"max_num_seqs": 4, "max_num_batched_tokens": 16, **pages_for(104)}),
        ("mistral", {"sliding_window": 20}, {"max_num_seqs": 8, "blend_chunk_cache_gib": 12 * SIZE / 2**20}),
        ("qwen3", {}, {**pages_for(152), "attention_backend": "torch_native"}),
    ],
)
@settings(max_examples=12, deadline=None, derandomize=True)  # always the same: a token on the edge of rounding is luck
@given(data=st.data())
def test_answers_are_those_of_a_request_alone(
    architecture: str, overrides: dict[str, Any], arguments: dict[str, Any], data: st.DataObject
) -> None:
    model = tiny_model(architecture, **overrides)
    arrivals = data.draw(st.lists(ARRIVAL, min_size=1, max_size=10))
    with engine(model, enable_blending=True, **{"block_size": BLOCK_SIZE, **arguments}) as llm:
        done = serve(llm, arrivals)
        for index, (_, rule, prefix, chunks, suffix, max_tokens, seed, abort) in enumerate(arrivals):
            assert str(index) in done or abort is not None
            if str(index) in done:
                output = done[str(index)]
                expected = alone(model, rule, prefix, tuple(chunks), suffix, max_tokens, seed)
                assert_same_logprobs(output, expected)
                assert blend_of(output) == blend_of(expected)
