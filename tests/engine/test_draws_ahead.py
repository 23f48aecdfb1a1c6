"""Draws that follow the tokens before them where steps are queued ahead: penalties, bad words, `min_tokens`, forms and
functions of the user's."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from tests import settings
from tests.engine.async_engines import async_llm, at_once
from tests.engine.engines import BLOCK_SIZE, engine, greedy, hf_model, pages_for, run, tiny_model, tokens_of
from tests.engine.tiny_tokenizers import byte_level
from vllm_blend import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

TINY = tiny_model("llama")
LETTERS = "BJKQXYZ"  # of which each is a token, and no two are one
IDS = [byte_level().get_vocab()[letter] for letter in LETTERS]  # so few that they come again
SPACE = [byte_level().get_vocab()["\u0120"]]  # as byte-level tokenizers write it
ROOM: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": BLOCK_SIZE}
TIGHT: dict[str, Any] = ROOM | pages_for(104)  # requests are preempted
Answers: TypeAlias = dict[str, list[tuple[list[int], str | None, int | str | None]]]

PIECES = st.lists(st.sampled_from(IDS), min_size=1, max_size=12)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt_token_ids": PIECES}),
    st.fixed_dictionaries(
        {
            "prefix": PIECES,
            "chunks": st.lists(PIECES, min_size=1, max_size=3),
            "suffix": PIECES,
            "blend_selector": st.sampled_from(["first_tokens", "value_deviation"]),
            "blend_recompute_ratio": st.just(0.3),
        }
    ),
)
AMOUNTS = st.sampled_from([0.0, 0.0, 0.6, -0.4])


def take_turns(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Prefer another letter at each place, and never the last one again."""
    logits[IDS[len(output) % len(IDS)]] += 2.0
    logits[output[-1:]] = -torch.inf
    return logits


def params_of(
    max_tokens: int, min_tokens: int, seed: int | None, form: str | None, takes_turns: bool, **options: Any
) -> SamplingParams:
    """Random ones have seeds: other draws depend on which steps requests share."""
    options |= {"temperature": 0.0 if seed is None else 1.2, "seed": seed, "max_tokens": max_tokens}
    if takes_turns:
        options["logits_processors"] = [take_turns]
    if form is not None:  # which ends with a token that is no letter
        return SamplingParams(structured_outputs=StructuredOutputsParams(regex=form), **options)
    return SamplingParams(allowed_token_ids=IDS + SPACE, min_tokens=min(min_tokens, max_tokens), **options)


PARAMS = st.builds(
    params_of,
    seed=st.sampled_from([None, None, 1, 2]),
    form=st.sampled_from([None, None, "[JKQ]{2,5}", "(B|XY|Z ){1,30}"]),
    takes_turns=st.sampled_from([False, False, False, True]),
    max_tokens=st.sampled_from([1, 2, 9, 24]),
    repetition_penalty=st.sampled_from([1.0, 1.05, 1.5, 0.8]),
    frequency_penalty=AMOUNTS,
    presence_penalty=AMOUNTS,
    bad_words=st.lists(st.text(LETTERS, min_size=2, max_size=4), max_size=5),
    min_tokens=st.sampled_from([0, 0, 4]),
    stop_token_ids=st.sampled_from([[], [], IDS[:1], IDS[:3]]),  # an end that is found out a step late
    stop=st.sampled_from([[], [], ["JK"], ["Q"]]),
)


@dataclass
class Arrival:
    at: int  # the step before which it comes
    prompt: dict[str, Any]
    params: SamplingParams
    abort: int | None  # steps after which it is aborted


ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 12), PROMPTS, PARAMS, st.sampled_from([None, None, None, 2, 6])),
    min_size=1,
    max_size=8,
)


@dataclass
class Service:
    """Adds and aborts requests at their steps. The reads in `failing` fail, and the draws in `failing_draws`, which has
    their steps done again."""

    llm: LLM
    arrivals: Sequence[Arrival]
    failing: Collection[int] = ()
    failing_draws: Collection[int] = ()
    num_ahead: int = 0
    num_failures: int = 0
    _done: Answers = field(default_factory=dict)

    def run(self, monkeypatch: pytest.MonkeyPatch) -> Answers:
        """Return the answers of the requests that finished."""
        inner, step = self.llm.llm_engine, 0
        reads, draws = iter(range(1, 10**6)), iter(range(1, 10**6))
        settle, schedule, draw = inner.model_executor.settle, inner.scheduler.schedule, inner.model_executor.draw

        def settling(result: Any) -> None:
            if next(reads) in self.failing:
                self.num_failures += 1
                raise RuntimeError("a step cannot be read")
            settle(result)

        def drawing(result: Any) -> None:
            if result.logits is not None and next(draws) in self.failing_draws:
                self.num_failures += 1
                raise RuntimeError("no token can be drawn")
            draw(result)

        def scheduling(ahead: bool = False) -> Any:
            output = schedule(ahead)
            self.num_ahead += ahead and bool(output)
            return output

        with monkeypatch.context() as patch:
            patch.setattr(inner.model_executor, "settle", settling)
            patch.setattr(inner.model_executor, "draw", drawing)
            patch.setattr(inner.scheduler, "schedule", scheduling)
            while inner.has_unfinished_requests() or step <= 12:
                self._arrive(step)
                failures = self.num_failures
                try:
                    self._enter(inner.step())
                except RuntimeError:
                    assert self.num_failures > failures
                step += 1
                assert step < 2000
        return self._done

    def _arrive(self, step: int) -> None:
        for index, arrival in enumerate(self.arrivals):
            if arrival.at == step:
                prompt: Any = arrival.prompt
                self.llm.llm_engine.add_request(str(index), prompt, arrival.params)
            if arrival.abort is not None and arrival.at + arrival.abort == step:
                self.llm.llm_engine.abort_request(str(index))

    def _enter(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                assert output.request_id not in self._done
                self._done[output.request_id] = [ending(completion) for completion in output.outputs]


def ending(completion: Any) -> tuple[list[int], str | None, int | str | None]:
    return completion.token_ids, completion.finish_reason, completion.stop_reason


@pytest.mark.cpu_only  # rounding may choose other tokens where steps have other shapes
@pytest.mark.parametrize("room", [ROOM, TIGHT], ids=["room", "tight"])
@examples(max_examples=12, deadline=None, derandomize=True)
@given(
    arrivals=ARRIVALS,
    num=st.sampled_from([1, 1, 2]),
    failing=st.sets(st.integers(1, 30), max_size=3),
    failing_draws=st.sets(st.integers(1, 30), max_size=3),
)
def test_traffic_is_answered_alike(
    room: dict[str, Any], arrivals: list[Arrival], num: int, failing: set[int], failing_draws: set[int]
) -> None:
    """Whatever arrives, is aborted or preempted, ends late, or is done again after a failed read or draw."""
    for arrival in arrivals[::2]:
        arrival.params.n = num if arrival.params.temperature else 1
    monkeypatch = pytest.MonkeyPatch()
    with engine(TINY, enable_blending=True, async_scheduling=False, **room) as llm:
        expected = Service(llm, arrivals).run(monkeypatch)
    with engine(TINY, enable_blending=True, async_scheduling=True, **room) as llm:
        ahead, failed = Service(llm, arrivals), Service(llm, arrivals, failing, failing_draws)
        answers = [service.run(monkeypatch) for service in (ahead, failed)]
    lengths = [len(tokens) for completions in expected.values() for tokens, _, _ in completions]
    assert ahead.num_ahead > 0 or max(lengths, default=0) <= 2
    for index, arrival in enumerate(arrivals):
        for found in answers:
            if arrival.abort is None or (str(index) in found and str(index) in expected):
                assert found[str(index)] == expected[str(index)]


@torch.inference_mode()
def reference_tokens(prompt: list[int], count: int, repetition: float, frequency: float, presence: float) -> list[int]:
    """Return what a plain loop over transformers' model generates, with its own repetition penalty."""
    output: list[int] = []
    for _ in range(count):
        ids = torch.tensor([prompt + output])
        logits = RepetitionPenaltyLogitsProcessor(repetition)(ids, hf_model(TINY)(ids).logits[:, -1].float())[0]
        for token in set(output):
            logits[token] -= frequency * output.count(token) + presence
        output.append(int(logits.argmax()))
    return output


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "penalties", [(1.05, 0.0, 0.0), (1.6, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 0.9), (0.9, 0.3, 0.4)]
)
def test_answers_are_those_of_transformers(penalties: tuple[float, float, float]) -> None:
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    prompts = [[5, 6, 7, 5, 6, 7], [9], IDS]
    params = greedy(24, ignore_eos=True, **dict(zip(names, penalties, strict=True)))
    with engine(TINY, async_scheduling=True, **ROOM) as llm:
        outputs = run(llm, [{"prompt_token_ids": ids} for ids in prompts], [params] * 3)
        plain = run(llm, [{"prompt_token_ids": ids} for ids in prompts], greedy(24, ignore_eos=True))
    assert tokens_of(outputs) == [reference_tokens(ids, 24, *penalties) for ids in prompts]
    assert penalties[0] == 1.05 or tokens_of(outputs) != tokens_of(plain)


@pytest.mark.parametrize("length", [2, 3, 4])
def test_a_bad_word_ends_in_the_step_behind_its_last_token_but_one(length: int) -> None:
    """Each answer becomes a bad word of the next one, which then has to draw another last token there."""
    options: dict[str, Any] = {"ignore_eos": True, "allowed_token_ids": IDS, "repetition_penalty": 1.2}
    prompt: Any = {"prompt_token_ids": IDS[:3]}
    with engine(TINY, async_scheduling=True, **ROOM) as llm:
        words: list[str] = []
        for _ in range(6):
            [output] = run(llm, prompt, greedy(20, bad_words=words, **options))
            text = output.outputs[0].text
            assert output.error is None and len(text) == 20
            assert not any(word in text for word in words)
            words.append(text[len(words) : len(words) + length])


@pytest.mark.cpu_only
def test_streams_are_answered_alike() -> None:
    prompts: list[Any] = [{"prompt_token_ids": IDS[i % 5 :] * (1 + i % 3)} for i in range(12)]
    params = [
        SamplingParams(
            temperature=1.1 * (i % 2),
            seed=i if i % 2 else None,
            max_tokens=10 + 3 * i,
            repetition_penalty=(1.0, 1.05, 1.4)[i % 3],
            presence_penalty=0.5 * (i % 4 == 1),
            frequency_penalty=-0.2 * (i % 5 == 2),
            bad_words=["JK", "XYZ", "QB"] if i % 3 else [],
            structured_outputs=StructuredOutputsParams(regex="[JQXZ]{9,}") if i % 4 == 2 else None,
            allowed_token_ids=IDS + SPACE,
            stop_token_ids=IDS[: i % 4 == 3],
            n=2 if i % 6 == 5 else 1,
        )
        for i in range(12)
    ]
    with engine(TINY, async_scheduling=False, **TIGHT) as offline:
        expected = run(offline, prompts, params)
    with async_llm(model=TINY, async_scheduling=True, **TIGHT) as llm:
        outputs = asyncio.run(at_once(llm, prompts, params))
    answers, one_by_one = (
        [[ending(each) for each in output.outputs] for output in some] for some in (outputs, expected)
    )
    assert answers == one_by_one
    assert settings.current().exact
