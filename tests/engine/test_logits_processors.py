"""Functions of the user's that change logits: against transformers, in every kind of batch, and when they fail."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import engine, greedy, hf_model, run, sampled, tiny_model, tokens_of
from tests.features.spec_decode.engines import speculating
from vllm_blend import SamplingParams

TINY = tiny_model("llama")
PLAIN = {"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]}
ENGINES: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"method": "ngram"},
    {"enable_blending": True},
    {"max_num_batched_tokens": 12, "max_num_seqs": 8},
]


def shift(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Favour a token of the prompt, which a penalty on these logits outweighs and a penalty before them does not, and a
    little one that depends on the whole output."""
    logits = 0.2 * logits + 5.0
    logits[prompt[len(output) % len(prompt)]] += 1.0
    logits[(31 * sum(prompt) + 7 * sum(output)) % len(logits)] += 0.8
    return logits


def in_place(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if output:
        logits[output[-1]] = -torch.inf
    return logits


@dataclass
class Recorder:
    """Remembers what it was called with, and changes nothing else than `shift` does."""

    calls: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.calls.append((list(prompt), list(output)))
        result = shift(prompt, output, logits)
        prompt.clear()  # copies: nothing of the engine's is changed
        output.clear()
        return result


@torch.inference_mode()
def transformers_tokens(prompt: list[int], count: int, penalize: LogitsProcessor, first: bool) -> list[int]:
    """Return what a plain loop generates, with the penalty before or after the functions."""
    output: list[int] = []
    for _ in range(count):
        ids = torch.tensor([prompt + output])
        logits = hf_model(TINY)(ids).logits[0, -1:].float()
        logits = penalize(ids, logits) if first else logits
        logits = in_place(output, shift(prompt, output, logits[0]))[None]
        output.append(int((logits if first else penalize(ids, logits)).argmax()))
    return output


@pytest.mark.cpu_only
def test_they_come_before_penalties_as_in_vllm() -> None:
    with engine(TINY) as llm:
        params = greedy(12, repetition_penalty=1.6, ignore_eos=True, logits_processors=[shift, in_place])
        penalize, prompt = RepetitionPenaltyLogitsProcessor(1.6), PLAIN["prompt_token_ids"]
        before, after = (transformers_tokens(prompt, 12, penalize, first) for first in (True, False))
        assert tokens_of(run(llm, PLAIN, params)) == [after] != [before]


@pytest.mark.parametrize("arguments", ENGINES, ids=lambda a: "-".join(a) or "plain")
def test_each_token_is_asked_about_once_with_its_own_history(arguments: dict[str, Any]) -> None:
    blends = "enable_blending" in arguments
    prompts: list[Any] = [PLAIN, tiny_prompt() if blends else {"prompt_token_ids": [9, 8]}, PLAIN, [3, 4]]
    with speculating(TINY, **arguments) if "method" in arguments else engine(TINY, **arguments) as llm:
        many: list[SamplingParams] = [
            greedy(9, ignore_eos=True, logits_processors=[shift]),
            greedy(7, ignore_eos=True, logits_processors=[in_place, shift]),
            sampled(9, seed=3, ignore_eos=True, logits_processors=[shift]),
            greedy(9, ignore_eos=True),
        ]
        alone = [tokens_of(run(llm, prompt, own))[0] for prompt, own in zip(prompts, many, strict=True)]
        recorders = [Recorder() for _ in range(3)]
        for own, recorder in zip(many, recorders, strict=False):
            own.logits_processors = [recorder if each is shift else each for each in own.logits_processors or ()]
        outputs = run(llm, prompts, many)
        assert tokens_of(outputs) == alone
        for recorder, output in zip(recorders, outputs, strict=False):
            tokens, prompt = output.outputs[0].token_ids, output.prompt_token_ids
            assert recorder.calls == [(prompt, tokens[:count]) for count in range(len(tokens))]
        assert (outputs[1].blend is not None) == blends


def raises(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output) == 2:
        logits.fill_(0.0)
        raise KeyError("gone")
    return logits


def is_cancelled(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise CancelledError("elsewhere")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def raises_unprintable(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise Unprintable


FAULTS: dict[str, Callable[[list[int], torch.Tensor], Any]] = {
    r"logits_processors\[0\] raised KeyError: 'gone'": raises,
    r"logits_processors\[0\] raised CancelledError: elsewhere": is_cancelled,
    r"logits_processors\[0\] raised Unprintable, whose text raises ZeroDivisionError": raises_unprintable,
    r"logits_processors\[0\] returned NoneType": lambda output, logits: None,
    r"logits_processors\[0\] returned torch.float32 \[5\]: it must return": lambda output, logits: logits[:5].float(),
    r"logits_processors\[0\] returned torch.complex64 .* of real numbers": lambda output, logits: logits + 1j,
    r"logits_processors\[0\] returned NaN": lambda output, logits: logits * torch.nan,
    "no token is left": lambda output, logits: torch.full_like(logits, -torch.inf),
}


def test_one_that_fails_ends_its_own_request_only() -> None:
    with engine(TINY) as llm:
        good = [greedy(6, logprobs=1), greedy(6, logits_processors=[shift]), sampled(6, seed=4)]
        expected = [tokens_of(run(llm, PLAIN, own))[0] for own in good]
        bad = [greedy(6, logprobs=1, logits_processors=[fault]) for fault in FAULTS.values()]
        outputs = run(llm, [PLAIN] * (len(bad) + 3), [good[0], *bad, *good[1:]])
        assert tokens_of([outputs[0], *outputs[-2:]]) == expected
        for output, message in zip(outputs[1:-2], FAULTS, strict=True):
            assert output.outputs[0].finish_reason == "error"
            with pytest.raises(ValueError, match=message):
                raise ValueError(output.error)
        assert [len(output.outputs[0].token_ids) for output in outputs[1:-2]] == [2, *[0] * (len(bad) - 1)]


def pick(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[10 + len(output)] = torch.inf
    return logits


@pytest.mark.parametrize("params", [greedy(4), sampled(4, top_p=0.9, repetition_penalty=0.5)], ids=["greedy", "drawn"])
def test_an_infinite_logit_is_chosen(params: SamplingParams) -> None:
    with engine(TINY) as llm:
        params.logits_processors = [pick]
        assert tokens_of(run(llm, PLAIN, params)) == [[10, 11, 12, 13]]


@dataclass
class Counter:
    """Favours one token more with every call, counted for each completion."""

    made: list[Counter]
    calls: int = 0

    def clone(self) -> Counter:
        self.made.append(Counter(self.made))
        return self.made[-1]

    def __call__(self, output: list[int], logits: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        self.calls += 1
        assert self.calls == len(output) + 1
        return logits


def test_completions_get_clones_where_a_function_has_them() -> None:
    counter = Counter([])
    with engine(TINY) as llm:
        [output] = run(llm, PLAIN, sampled(5, n=3, seed=1, ignore_eos=True, logits_processors=[counter, in_place]))
        assert output.error is None
        assert (counter.calls, [each.calls for each in counter.made]) == (0, [5, 5, 5])


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (shift, "must be a list of functions"),
        ([shift, 3], r"logits_processors\[1\] is 3, which is not callable"),
        ([lambda: None], r"logits_processors\[0\] takes 0 arguments: it must take \(output_token_ids, logits\) or"),
    ],
)
def test_what_cannot_be_called(processors: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(logits_processors=processors)
