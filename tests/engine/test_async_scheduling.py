"""A step queued before the last one is read changes nothing but the time it takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests import settings
from tests.blend.rules import selectors_restored
from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import (
    BLOCK_SIZE,
    TINY_VOCABULARY,
    assert_empty,
    engine,
    greedy,
    pages_for,
    run,
    sampled,
    tiny_model,
    tokens_of,
)
from vllm_blend import LLM, Evidence, LLMEngine, RequestOutput, SamplingParams, Selector, ops, register_selector

IDS = [(17 * i * i + 5 * i + 3) % TINY_VOCABULARY for i in range(60)]
MODEL = tiny_model("llama")
ROOM: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": BLOCK_SIZE}


def prompts() -> list[Any]:
    plain = [{"prompt_token_ids": IDS[i : i + n]} for i, n in ((0, 3), (5, 20), (0, 19), (30, 8), (5, 24))]
    chunked: dict[str, Any] = {"prefix": IDS[:4], "chunks": [IDS[10:20], IDS[20:26]], "suffix": IDS[40:43]}
    return [*plain, chunked, chunked | {"blend_selector": "value_deviation"}]


def params(**options: Any) -> list[SamplingParams]:
    lengths = (1, 2, 12, 30, 7, 9, 3)
    return [
        sampled(n, seed=i, temperature=0.8, **options) if i % 2 else greedy(n, **options) for i, n in enumerate(lengths)
    ]


def launches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Counts the steps that were scheduled, by whether one before them was still unread."""
    counted: Counter[bool] = Counter()
    scheduler = llm.llm_engine.scheduler
    schedule = scheduler.schedule

    def counting(ahead: bool = False) -> Any:
        output = schedule(ahead)
        counted[ahead] += bool(output)
        return output

    monkeypatch.setattr(scheduler, "schedule", counting)
    return counted


@pytest.mark.parametrize("room", [ROOM, ROOM | pages_for(104)])  # too little for all: some are preempted
@pytest.mark.parametrize(
    "options",
    [
        {"ignore_eos": True},
        {"ignore_eos": True, "logprobs": 2},
        {"stop_token_ids": list(range(0, TINY_VOCABULARY, 5))},  # ends are found out a step late
        {"ignore_eos": True, "presence_penalty": 0.7, "repetition_penalty": 1.3},
        {"min_tokens": 1, "stop_token_ids": list(range(0, TINY_VOCABULARY, 5))},
        {"repetition_penalty": 1.3, "stop_token_ids": list(range(0, TINY_VOCABULARY, 5)), "logprobs": 1},
    ],
)
def test_same_answers(options: dict[str, Any], room: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(MODEL, enable_blending=True, async_scheduling=False, **room) as llm:
        expected = run(llm, prompts(), params(**options))
    with engine(MODEL, enable_blending=True, async_scheduling=True, **room) as llm:
        counted = launches(llm, monkeypatch)
        outputs = run(llm, prompts(), params(**options))
    exact = settings.current().exact
    assert not exact or tokens_of(outputs) == tokens_of(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        if ours.outputs[0].token_ids == theirs.outputs[0].token_ids:
            assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason
            assert ours.outputs[0].stop_reason == theirs.outputs[0].stop_reason
        if "logprobs" in options or not exact:
            assert_same_logprobs(ours, theirs)
        assert blend_of(ours) == blend_of(theirs)
    assert counted[True]


@pytest.mark.parametrize("min_tokens", [2, 5, 6])
def test_min_tokens_count_what_is_unread(min_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs ahead does not know which tokens were drawn, but it knows how many: it stops an answer
    neither too early nor too late."""
    stops = list(range(0, TINY_VOCABULARY, 2))  # most answers end with the first token that may end them
    asked = [
        greedy(16, min_tokens=min_tokens, stop_token_ids=stops),
        sampled(16, seed=1, temperature=1.5, min_tokens=min_tokens, stop_token_ids=stops),
        greedy(16, ignore_eos=True),
    ]
    answers = []
    for ahead in (False, True):
        with engine(MODEL, async_scheduling=ahead, **ROOM) as llm:
            counted = launches(llm, monkeypatch)
            answers.append(run(llm, prompts()[:3], asked))
        assert bool(counted[True]) == ahead
    if settings.current().exact:
        assert tokens_of(answers[0]) == tokens_of(answers[1])
    for output in answers[1][:2]:
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) > min_tokens
        assert not set(token_ids[:min_tokens]) & set(stops)
        assert output.outputs[0].finish_reason == "length" or token_ids[-1] in stops


def step_to_the_end(inner: LLMEngine) -> tuple[list[RequestOutput], int]:
    """Return the outputs of all steps that an engine has to do, and how many of these failed."""
    outputs, failures = list[RequestOutput](), 0
    while inner.has_unfinished_requests():
        try:
            outputs += inner.step()
        except RuntimeError:
            failures += 1
    return outputs, failures


@pytest.mark.parametrize("failing_read", range(1, 7))
def test_min_tokens_hold_when_a_step_cannot_be_read(failing_read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of the step that failed and of the one queued behind it are drawn again, and count no more."""
    stops = list(range(0, TINY_VOCABULARY, 2))
    asked = greedy(16, min_tokens=5, stop_token_ids=stops)
    with engine(MODEL, async_scheduling=True, **ROOM) as llm:
        [expected] = run(llm, prompts()[1], asked)
        inner, reads = llm.llm_engine, iter(range(1, 1000))
        settle = inner.model_executor.settle

        def failing(result: Any) -> None:
            if next(reads) == failing_read:
                raise RuntimeError("a step cannot be read")
            settle(result)

        monkeypatch.setattr(inner.model_executor, "settle", failing)
        inner.add_request("again", prompts()[1], asked)
        outputs, failures = step_to_the_end(inner)
        token_ids = outputs[-1].outputs[0].token_ids
    assert failures == 1
    assert len(token_ids) > 5 and not set(token_ids[:5]) & set(stops)
    if settings.current().exact:
        assert token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("failing_call", range(2, 6))
@pytest.mark.parametrize("failing_part", ["read", "draw", "choice"])
def test_a_failed_step_costs_a_seeded_request_no_random_number(
    failing_part: str, failing_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a step cannot be read, the draw behind it is still to come; and a draw may fail before it has random
    numbers, or behind that, as where an interrupt comes in the middle of a user's function."""
    asked = sampled(12, seed=1, temperature=1.5, repetition_penalty=1.2, ignore_eos=True)
    with engine(MODEL, async_scheduling=True, **ROOM) as llm:
        [expected] = run(llm, prompts()[1], asked)
        inner, calls = llm.llm_engine, iter(range(1, 1000))
        executor = inner.model_executor
        owner, name = {"read": (executor, "settle"), "draw": (executor, "draw"), "choice": (ops, "penalize")}[
            failing_part
        ]
        work = getattr(owner, name)

        def failing(*given: Any) -> Any:
            if next(calls) == failing_call:
                raise RuntimeError("a step fails")
            return work(*given)

        monkeypatch.setattr(owner, name, failing)
        inner.add_request("again", prompts()[1], asked)
        outputs, failures = step_to_the_end(inner)
        monkeypatch.undo()
    assert failures == 1
    if settings.current().exact:
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_step_can_be_done_again_that_drew_nothing_for_a_request_which_had_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A blend fails in its first part, while the draw behind its last part waits for another request's tokens. If the
    step of that draw cannot be read, the failed request has no random number to give back."""
    room: dict[str, Any] = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": BLOCK_SIZE}
    with selectors_restored():

        @register_selector
        @dataclass(frozen=True)
        class Broken(Selector):
            name: ClassVar[str] = "broken_in_its_first_part"

            def score(self, evidence: Evidence) -> torch.Tensor:
                raise ValueError("no score")

        blend: Any = {"prefix": IDS[:1], "chunks": [IDS[1:3], IDS[3:10]], "suffix": IDS[10:18]}
        with engine(MODEL, enable_blending=True, async_scheduling=True, **room) as llm:
            other = greedy(12, repetition_penalty=1.2, ignore_eos=True)
            [expected] = run(llm, prompts()[0], other)
            inner = llm.llm_engine
            settle, unread = inner.model_executor.settle, list[int]()

            def settling(result: Any) -> None:
                if not unread and "fails" in [request.request_id for request in result.sampled]:
                    unread.append(len(result.sampled))
                    raise RuntimeError("a step cannot be read")
                settle(result)

            monkeypatch.setattr(inner.model_executor, "settle", settling)
            inner.add_request("other", prompts()[0], other)
            inner.step()
            selecting = blend | {"blend_selector": Broken.name}
            inner.add_request("fails", selecting, sampled(9, seed=1, temperature=1.0))
            outputs: dict[str, Any] = {}
            failures: list[str] = []
            while inner.has_unfinished_requests():
                try:
                    outputs |= {output.request_id: output for output in inner.step()}
                except RuntimeError as error:
                    failures.append(str(error))
            monkeypatch.undo()
    assert unread == [2] and failures == ["a step cannot be read"]
    assert outputs["fails"].error is not None and "no score" in outputs["fails"].error
    if settings.current().exact:
        assert tokens_of([outputs["other"]]) == tokens_of([expected])


def test_a_draw_waits_for_the_tokens_that_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's functions see all tokens, once for each token that is drawn: not for an answer that has ended, which
    is found out while the step behind its end is on the device. The model runs ahead of them, and of all others."""
    stops = list(range(0, TINY_VOCABULARY, 5))
    seen: list[list[list[int]]] = []
    answers = []
    for ahead in (False, True):
        calls: list[list[int]] = []

        def look(output: list[int], logits: torch.Tensor, calls: list[list[int]] = calls) -> torch.Tensor:
            calls.append(output)
            return logits

        asked = [
            greedy(20, ignore_eos=True, logits_processors=[look]),
            sampled(20, seed=1, temperature=1.5, stop_token_ids=stops, logits_processors=[look]),
            greedy(24, ignore_eos=True),
        ]
        with engine(MODEL, async_scheduling=ahead, **ROOM) as llm:
            counted = launches(llm, monkeypatch)
            answers.append(tokens_of(run(llm, prompts()[:3], asked)))
        assert (counted[True] > 4 * counted[False]) == ahead
        seen.append(sorted(calls))
    assert 1 < len(answers[1][1]) < 20
    for calls, (first, second, _) in zip(seen, answers, strict=True):
        assert calls == sorted([first[:n] for n in range(len(first))] + [second[:n] for n in range(len(second))])
    assert answers[0] == answers[1] or not settings.current().exact


def test_a_known_end_costs_no_step_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(MODEL, async_scheduling=True, **ROOM) as llm:
        counted = launches(llm, monkeypatch)
        run(llm, prompts()[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert counted == {False: 1, True: 7}


def test_pages_are_shared_by_content_as_without_it() -> None:
    """A block whose last token was in flight when it filled is found by the next prompt."""
    prompt, one = {"prompt_token_ids": IDS[:5]}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with engine(MODEL, async_scheduling=True, **ROOM) as llm:
        [first] = run(llm, prompt, one)
        longer = {"prompt_token_ids": [*IDS[:5], *first.outputs[0].token_ids]}
        [second] = run(llm, longer, one)
        assert second.num_cached_tokens == 16


def test_an_abort_between_two_steps() -> None:
    with engine(MODEL, async_scheduling=True, **ROOM) as llm:
        inner = llm.llm_engine
        for name in ("a", "b"):
            inner.add_request(name, prompts()[1], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        inner.step()
        inner.abort_request("a")
        outputs = []
        while inner.has_unfinished_requests():
            outputs += inner.step()
        assert {output.request_id for output in outputs} == {"b"}
        inner.add_request("c", prompts()[1], SamplingParams(temperature=0, max_tokens=1))
        inner.step()
        inner.abort_request("c")
        assert_empty(llm)
