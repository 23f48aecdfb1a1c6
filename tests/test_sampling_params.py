from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from tests.engine.tiny_tokenizers import byte_fallback, byte_level
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.structured_outputs import StructuredOutputsParams
from vllm_blend.unsupported.sampling_params import UNSUPPORTED_SAMPLING_PARAMS


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (16, 0, None, None)
    assert (params.seed, params.stop, params.stop_token_ids, params.bad_words) == (None, [], [], [])
    assert (params.detokenize, params.skip_special_tokens, params.spaces_between_special_tokens) == (True, True, True)
    assert not params.ignore_eos and not params.include_stop_str_in_output and not params.greedy


def params_with(field: str, value: Any) -> SamplingParams:
    return SamplingParams(**{field: value})


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0"),
    ({"n": 2, "temperature": 0.0}, "n=2 .*n=1"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5 .*at least -2 and at most 2"),
    ({"frequency_penalty": -3}, "frequency_penalty=-3"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 .*at least 1e-30"),
    ({"repetition_penalty": 1e-45}, "repetition_penalty=1e-45 .*at least 1e-30"),
    ({"repetition_penalty": 1e39}, r"repetition_penalty=1e\+39 .*at most 1e\+30"),
    ({"logit_bias": {5: 1e300}}, r"logit_bias\[5\]=1e\+300 .*at most 1e\+38"),
    ({"logit_bias": {5: -1e300}}, r"logit_bias\[5\]=-1e\+300 .*at least -1e\+38"),
    ({"temperature": -1.0}, "temperature=-1.0"),
    ({"temperature": float("nan")}, "temperature=nan"),
    ({"temperature": float("inf")}, "temperature=inf"),
    ({"top_p": 0.0}, "top_p=0.0 .*above 0 and at most 1"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"top_k": -2}, "top_k=-2 .*at least -1"),
    ({"top_k": 2**63}, "top_k=9223372036854775808 .*at most 9223372036854775807"),
    ({"temperature": 10**400}, "temperature=1000.* is out of range"),
    ({"logit_bias": {5: 10**400}}, r"logit_bias\[5\]=1000.* is out of range"),
    ({"min_p": 1.5}, "min_p=1.5"),
    ({"seed": 2**63}, "seed="),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 20}, "min_tokens=20 is above max_tokens=16"),
    ({"logprobs": -2}, "logprobs=-2"),
    ({"prompt_logprobs": -2}, "prompt_logprobs=-2"),
    ({"stop": ["a", ""]}, "stop=.*empty"),
    ({"stop": ""}, "stop=.*empty"),
    ({"stop": "a", "detokenize": False}, "detokenize=True"),
    ({"reasoning_marks": ("<think>", "")}, "reasoning_marks=.*second is not empty"),
    ({"reasoning_marks": "ab"}, "reasoning_marks='ab'.*two strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"bad_words": [" "]}, "bad_words=.*empty"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias=-1"),
    ({"logit_bias": {3: float("nan")}}, r"logit_bias\[3\]=nan"),
    ({"logit_bias": {3: float("inf")}}, r"logit_bias\[3\]=inf"),
]
WRONG_TYPE: list[tuple[dict[str, Any], str]] = [
    ({"n": 1.5}, "n=1.5 must be an integer"),
    ({"temperature": "hot"}, "temperature='hot' must be a number"),
    ({"temperature": True}, "temperature=True must be a number"),
    ({"max_tokens": "16"}, "max_tokens='16' must be an integer"),
    ({"stop": [1]}, "stop=.*strings only"),
    ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list of token ids"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids='x' must be an integer"),
    ({"bad_words": "word"}, "bad_words='word' must be a list of strings"),
    ({"logit_bias": [1]}, "logit_bias=.*must be a dict"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias='x' must be an integer"),
    ({"top_q": 3}, "unknown sampling parameter 'top_q': did you mean 'top_"),
]


@pytest.mark.parametrize(("settings", "message"), INVALID, ids=lambda value: repr(value)[:40])
def test_invalid_value_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize(("settings", "message"), WRONG_TYPE, ids=lambda value: repr(value)[:40])
def test_wrong_type_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SamplingParams(**settings)


def test_what_only_vllm_has_is_refused_by_name_unless_it_asks_for_nothing() -> None:
    for name, parameter in UNSUPPORTED_SAMPLING_PARAMS.items():
        nothing: dict[str, Any] = {name: None}
        default: dict[str, Any] = {name: parameter.default}
        other: dict[str, Any] = {name: "something else"}
        assert SamplingParams(**nothing) == SamplingParams(**default) == SamplingParams()
        with pytest.raises(ValueError) as refusal:
            SamplingParams(**other)
        assert str(refusal.value) == f"{name}='something else' is not supported: {parameter.reason}"
    refused: dict[str, Any] = {"n": 2, "best_of": 3}
    with pytest.raises(ValueError, match="best_of=3 is not supported: give n"):
        SamplingParams(**refused)


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams) if str(field.type) == "bool"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{field}={value!r} must be True or False"):
        params_with(field, value)


def test_accepted_spellings() -> None:
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams(logit_bias={"12": 1, 7: -3.5}).logit_bias == {12: 1.0, 7: -3.5}  # type: ignore[dict-item]
    assert SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None
    assert SamplingParams(top_k=-1).top_k == -1


def test_greedy_below_a_hundred_thousandth() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize("copied", [SamplingParams.clone, lambda params: params.for_completions()[0]])
def test_copies_share_nothing_that_can_change(copied: Callable[[SamplingParams], SamplingParams]) -> None:
    given: dict[str, Any] = {
        "stop": ["a"],
        "stop_token_ids": [1],
        "allowed_token_ids": [1, 2],
        "bad_words": ["b"],
        "logit_bias": {1: 2.0},
        "logits_processors": [lambda ids, logits: logits],
        "structured_outputs": StructuredOutputsParams(json={"type": "object"}),
    }
    params = SamplingParams(**given, seed=3)
    copy = copied(params)
    assert copy == params
    mutable = [name for name, value in vars(params).items() if isinstance(value, (list, dict, StructuredOutputsParams))]
    assert set(mutable) == set(given)  # a new field of this kind belongs in the test
    assert all(getattr(copy, name) is not getattr(params, name) for name in mutable)
    assert copy.structured_outputs.json is not params.structured_outputs.json  # type: ignore[union-attr]


def test_what_was_changed_after_it_was_checked_is_checked_again() -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(ValueError, match=r"temperature=-1\.0 is out of range"):
        params.for_completions()


class Counting:
    """A logits processor with a state: how often it ran."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, ids: list[int], logits: Any) -> Any:
        self.runs += 1
        return logits

    def clone(self) -> Counting:
        return Counting()


@pytest.mark.parametrize("copied", [SamplingParams.clone, lambda params: params.for_completions()[0]])
def test_a_processor_that_is_listed_twice_has_one_state_in_a_copy(
    copied: Callable[[SamplingParams], SamplingParams],
) -> None:
    twice = Counting()
    first, second = copied(SamplingParams(logits_processors=[twice, twice])).logits_processors or (None, None)
    assert first is second is not twice and isinstance(first, Counting)


@pytest.mark.parametrize("given", [Counting(), 5])
def test_processors_that_became_no_list_are_named(given: Any) -> None:
    params = SamplingParams()
    params.logits_processors = given
    with pytest.raises(TypeError, match=r"logits_processors=.* must be a list of functions"):
        params.for_completions()


def test_completions_get_different_seeds() -> None:
    params = SamplingParams(n=3, seed=2**63 - 2, temperature=0.7)
    several = params.for_completions()
    assert several[0].seed == params.seed and len({p.seed for p in several}) == 3
    assert all(p.n == 1 and p.temperature == 0.7 for p in several)
    assert [each.seed for each in SamplingParams(n=2).for_completions()] == [None, None]
    assert None not in {each.seed for each in SamplingParams(n=9, seed=-5).for_completions()}


def test_completions_share_lists_that_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `n` costs does not depend on how long the lists are, and a processor keeps a state for each completion."""
    params = SamplingParams(n=5, logit_bias={1: 2.0}, allowed_token_ids=[1], bad_words=["a"], stop=["b"])
    params.logits_processors, checks = [Counting()], list[SamplingParams]()
    check = SamplingParams.__post_init__

    def counted(params: SamplingParams) -> None:
        checks.append(params)
        check(params)

    monkeypatch.setattr(SamplingParams, "__post_init__", counted)
    several = params.for_completions()
    assert len(checks) == 1 and all(each.n == 1 for each in several)
    for name in ("logit_bias", "allowed_token_ids", "bad_words", "stop"):
        assert len({id(getattr(each, name)) for each in several}) == 1
        assert getattr(several[0], name) is not getattr(params, name)
    assert len({id((each.logits_processors or [None])[0]) for each in several}) == 5


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_bind_refuses_tokens_outside_the_vocabulary(field: str) -> None:
    value: Any = {5: 1.0, 420: 1.0} if field == "logit_bias" else [5, 420]
    params = params_with(field, value)
    with pytest.raises(ValueError, match=re.escape(f"{field} names [420], outside the vocabulary of 420 tokens")):
        params.bind(byte_level(), 420)
    assert params.bind(byte_level(), 421) == []


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_bind_refuses_more_logprobs_than_tokens(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=421 is above the vocabulary of 420"):
        params_with(field, 421).bind(byte_level(), 420)
    assert params_with(field, -1).bind(byte_level(), 420) == []


def test_bad_words_become_token_sequences_with_and_without_a_space() -> None:
    tokenizer = byte_level()
    sequences = SamplingParams(bad_words=["dog", " fox jumps"]).bind(tokenizer, 420)
    assert {tokenizer.decode(list(sequence)) for sequence in sequences} == {"dog", " dog", "fox jumps", " fox jumps"}
    assert len(sequences) == 4


def test_bad_words_of_a_tokenizer_that_hides_the_first_space() -> None:
    tokenizer = byte_fallback()
    sequences = SamplingParams(bad_words=["dog"]).bind(tokenizer, len(tokenizer))
    assert (tokenizer.convert_tokens_to_ids("▁dog"),) in sequences


def test_bind_refuses_bad_words_beyond_the_models_vocabulary() -> None:
    with pytest.raises(ValueError, match="bad_words: 'dog' has no tokens in the vocabulary of 50"):
        SamplingParams(bad_words=["dog"]).bind(byte_level(), 50)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_bind_without_a_tokenizer_refuses_text(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}=.* needs a tokenizer"):
        params_with(field, ["x"]).bind(None, 100)
    assert SamplingParams(stop_token_ids=[3]).bind(None, 100) == []
