"""Whole engines: speculation changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import settings as run_settings
from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import (
    DEMO,
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
from tests.engine.test_traffic import ARRIVAL, alone, serve
from tests.features.spec_decode.engines import IDS, ORACLE, PROMPTS, counts, oracle_of, real_drafters, speculating
from vllm_blend import LLM, RequestOutput

MODEL = tiny_model("llama")
STOPS = list(range(0, TINY_VOCABULARY, 9))


def teach(llm: LLM, outputs: list[RequestOutput]) -> None:
    """Let the oracle know these answers."""
    oracle = oracle_of(llm)
    assert oracle is not None
    for output in outputs:
        oracle.answers[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)


def assert_same(ours: RequestOutput, plain: RequestOutput) -> None:
    if run_settings.current().exact:
        assert tokens_of([ours]) == tokens_of([plain])
        assert ours.outputs[0].text == plain.outputs[0].text
        assert ours.outputs[0].finish_reason == plain.outputs[0].finish_reason
        assert ours.outputs[0].stop_reason == plain.outputs[0].stop_reason
    if plain.outputs[0].logprobs is not None:
        assert_same_logprobs(ours, plain)


OPTIONS: list[dict[str, Any]] = [
    {"ignore_eos": True, "logprobs": 3},
    {"stop_token_ids": STOPS},
    {"stop_token_ids": STOPS, "min_tokens": 7, "logprobs": 1},
    {"ignore_eos": True, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1},
    {"ignore_eos": True, "presence_penalty": 0.9},
    {"ignore_eos": True, "logit_bias": {7: 4.0}, "allowed_token_ids": list(range(0, 300, 2))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
@pytest.mark.parametrize("params", [greedy, sampled])
@pytest.mark.parametrize("error_every", [0, 3])
def test_answers_are_those_of_plain_decoding(params: Any, options: dict[str, Any], error_every: int) -> None:
    """Greedy and seeded, alone and in a batch, with a drafter that is always right, or wrong now and then."""
    asked = params(30, **options, **({} if params is greedy else {"seed": 5, "top_p": 0.9, "temperature": 0.8}))
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS, asked)
    with speculating(MODEL, ORACLE) as llm:
        teach(llm, plain)
        oracle_of(llm).error_every["n"] = error_every  # type: ignore[union-attr]
        before = counts(llm)
        batch = run(llm, PROMPTS, asked)
        singles = [run(llm, prompt, asked)[0] for prompt in PROMPTS]
        drafts, drafted, accepted = (b - a for a, b in zip(before, counts(llm), strict=True))
    for ours, expected in zip([*batch, *singles], [*plain, *plain], strict=True):
        assert_same(ours, expected)
    assert drafts > 0
    if run_settings.current().exact:
        assert accepted == drafted if error_every == 0 else 0 < accepted < drafted


def test_steps_that_cannot_be_read_change_no_seeded_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have drawn for every draft, too: the steps that replace them draw the same random numbers."""
    asked = sampled(30, seed=5, ignore_eos=True, logprobs=1)
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS, asked)
    with speculating(MODEL, ORACLE) as llm:
        teach(llm, plain)
        oracle_of(llm).error_every["n"] = 0  # type: ignore[union-attr]
        inner, before = llm.llm_engine, counts(llm)
        process, calls = inner.results.process, itertools.count(1)

        def failing(*step: Any) -> Any:
            if next(calls) % 3 == 0:
                raise RuntimeError("cannot be read")
            return process(*step)

        monkeypatch.setattr(inner.results, "process", failing)
        for index, prompt in enumerate(PROMPTS):
            inner.add_request(str(index), cast(Any, prompt), asked)
        done: dict[str, RequestOutput] = {}
        while inner.has_unfinished_requests():
            with contextlib.suppress(RuntimeError):
                done |= {output.request_id: output for output in inner.step() if output.finished}
        assert counts(llm)[2] > before[2]
    for index, expected in enumerate(plain):
        assert_same(done[str(index)], expected)


@pytest.mark.parametrize("method", real_drafters())
def test_demo_answers_are_those_of_plain_decoding(method: str) -> None:
    """Real text, plain and blended: fewer steps, the same answers."""
    prompts = [demo_prompt(i, 6, **options) for i in range(3) for options in ({}, {"blend_selector": "full"})]
    asked = greedy(16, logprobs=1)
    with engine(DEMO, enable_blending=True) as llm:
        plain = run(llm, prompts, asked)
    with speculating(DEMO, method, enable_blending=True, block_size=16) as llm:
        before = counts(llm)
        outputs = run(llm, prompts, asked)
        assert counts(llm)[2] > before[2]
    for ours, expected in zip(outputs, plain, strict=True):
        assert_same(ours, expected)
        assert blend_of(ours) == blend_of(expected)


def test_bad_words_and_stop_strings_see_every_tokens_own_history() -> None:
    with engine(MODEL) as llm:
        [free] = run(llm, PROMPTS[1], greedy(24, ignore_eos=True))
        text = free.outputs[0].text
        asked = [
            greedy(24, ignore_eos=True, stop=[text[10:13]]),
            greedy(24, ignore_eos=True, stop=[text[10:13]], include_stop_str_in_output=True),
            greedy(24, ignore_eos=True, bad_words=[text[4:6], text[12:15]]),
        ]
        plain = run(llm, [PROMPTS[1]] * 3, asked)
    assert any(output.outputs[0].stop_reason for output in plain)
    with speculating(MODEL, ORACLE, most=9) as llm:
        oracle_of(llm).error_every["n"] = 0  # type: ignore[union-attr]
        for params, expected in zip(asked, plain, strict=True):
            teach(llm, [free])  # goes on behind the end that the stop string makes
            assert_same(run(llm, PROMPTS[1], params)[0], expected)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_an_answer_is_never_longer_than_asked_for(max_tokens: int) -> None:
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS, greedy(20, ignore_eos=True))
    with speculating(MODEL, ORACLE, most=9) as llm:
        teach(llm, plain)
        outputs = run(llm, PROMPTS, greedy(max_tokens, ignore_eos=True))
        full = run(llm, {"prompt_token_ids": IDS[:50] + IDS[:43]}, greedy(20, ignore_eos=True))  # of 96 positions
    assert [len(tokens) for tokens in tokens_of(outputs)] == [max_tokens] * len(PROMPTS)
    assert all(output.outputs[0].finish_reason == "length" for output in [*outputs, *full])
    assert len(full[0].outputs[0].token_ids) == 3


def test_steps_and_counts() -> None:
    """Seventeen tokens: one from the prompt, then drafts of five and one more."""
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS[:1], greedy(17, ignore_eos=True))
    with speculating(MODEL, ORACLE) as llm:
        teach(llm, plain)
        oracle_of(llm).error_every["n"] = 0  # type: ignore[union-attr]
        before, steps = counts(llm), llm.llm_engine.metrics.num_steps
        generated = llm.llm_engine.metrics.generation_tokens
        [output] = run(llm, PROMPTS[:1], greedy(17, ignore_eos=True))
        after = counts(llm)
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 13, 13]
    assert llm.llm_engine.metrics.num_steps - steps == 4
    assert llm.llm_engine.metrics.generation_tokens - generated == 17
    assert output.metrics is not None
    assert output.metrics.spec_token_acceptance_counts == [4, 3, 3, 3, 2, 2]


def test_plain_engines_count_no_drafts() -> None:
    with engine(MODEL) as llm:
        [output] = run(llm, PROMPTS[:1], greedy(4, ignore_eos=True))
        assert counts(llm) == (0, 0, 0)
    assert output.metrics is not None
    assert output.metrics.spec_token_acceptance_counts is None


def test_rejected_drafts_leave_nothing_in_the_prefix_cache() -> None:
    """Prompts that go on as the answer does, and as the wrong drafts would have it: both are answered as ever."""
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS[1], greedy(30, ignore_eos=True))
        answer = plain[0].outputs[0].token_ids
        prompt = PROMPTS[1]["prompt_token_ids"]
        wrong = [
            (token + 1) % TINY_VOCABULARY if (len(prompt) + i) % 4 == 0 else token for i, token in enumerate(answer)
        ]
        again = [{"prompt_token_ids": [*prompt, *tail, 9]} for tail in (answer, wrong)]
        llm.reset_prefix_cache()
        expected = run(llm, again, greedy(8, ignore_eos=True, logprobs=1))
    with speculating(MODEL, ORACLE) as llm:
        teach(llm, plain)
        assert_same(run(llm, PROMPTS[1], greedy(30, ignore_eos=True))[0], plain[0])
        outputs = run(llm, again, greedy(8, ignore_eos=True, logprobs=1))
        assert outputs[0].num_cached_tokens is not None
        assert outputs[0].num_cached_tokens >= 40, "what was accepted is found"
    for ours, one in zip(outputs, expected, strict=True):
        assert_same(ours, one)


def test_several_completions_of_a_prompt() -> None:
    asked = sampled(14, n=3, seed=1, ignore_eos=True)
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS[0], asked)
    with speculating(MODEL, ORACLE) as llm:
        teach(llm, plain)
        outputs = run(llm, PROMPTS[0], asked)
    if run_settings.current().exact:
        assert tokens_of(outputs) == tokens_of(plain)


@pytest.mark.parametrize(
    ("architecture", "overrides", "arguments"),
    [
        ("llama", {}, {"max_num_seqs": 4, "max_num_batched_tokens": 16, **pages_for(104)}),
        ("mistral", {"sliding_window": 20}, {"max_num_seqs": 8}),
        ("qwen3", {}, {**pages_for(152), "attention_backend": "torch_native"}),
    ],
)
@settings(max_examples=12, deadline=None, derandomize=True)  # always the same: a token on the edge of rounding is luck
@given(data=st.data())
def test_random_traffic(
    architecture: str, overrides: dict[str, Any], arguments: dict[str, Any], data: st.DataObject
) -> None:
    """Plain and blended requests that come, wait, are preempted and aborted: answers are those of plain decoding,
    alone."""
    model = tiny_model(architecture, **overrides)
    arrivals = data.draw(st.lists(ARRIVAL, min_size=1, max_size=8))
    method = data.draw(st.sampled_from([ORACLE, ORACLE, *real_drafters()]))
    expected = [
        alone(model, rule, prefix, tuple(chunks), suffix, max_tokens, seed)
        for _, rule, prefix, chunks, suffix, max_tokens, seed, _ in arrivals
    ]
    with speculating(model, method, enable_blending=True, **arguments) as llm:
        if method == ORACLE:
            teach(llm, expected)
            oracle_of(llm).error_every["n"] = data.draw(st.sampled_from([0, 3, 7]))  # type: ignore[union-attr]
        done = serve(llm, arrivals)
        for index, arrival in enumerate(arrivals):
            assert str(index) in done or arrival[-1] is not None
            if str(index) in done:
                assert_same_logprobs(done[str(index)], expected[index])
                assert blend_of(done[str(index)]) == blend_of(expected[index])


def test_a_model_that_breaks_fails_the_request_and_not_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(MODEL) as llm:
        plain = run(llm, PROMPTS[:2], greedy(12, ignore_eos=True))
    with speculating(MODEL, ORACLE, enforce_eager=True) as llm:  # a graph would not call what is patched
        teach(llm, plain)
        oracle_of(llm).error_every["n"] = 0  # type: ignore[union-attr]
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        compute = model.compute_logits

        def broken(hidden: Any) -> Any:
            logits = compute(hidden)
            if logits.shape[0] > 6:  # both verify drafts: the second row of the first request
                logits[1] = float("nan")
            return logits

        monkeypatch.setattr(model, "compute_logits", broken)
        first, second = run(llm, PROMPTS[:2], greedy(12, ignore_eos=True))
    assert first.error is not None
    assert "NaN" in first.error
    assert list(first.outputs[0].token_ids) == list(plain[0].outputs[0].token_ids[:2])
    assert_same(second, plain[1])
