"""Answers have the form that was asked for, whatever the model says and however the engine computes them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests import settings
from tests.engine.engines import (
    ROOT,
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
from tests.features.spec_decode.engines import ORACLE, counts, oracle_of, speculating
from tests.features.structured.forms import FORMS, Form
from vllm_blend import SamplingParams, StructuredOutputsParams

MODEL = tiny_model("llama", max_position_embeddings=512)
IDS = [(17 * i * i + 5 * i + 3) % TINY_VOCABULARY for i in range(60)]
CHUNKED: dict[str, Any] = {"prefix": IDS[:4], "chunks": [IDS[10:20], IDS[20:26]], "suffix": IDS[40:43]}
PROMPTS: list[Any] = [{"prompt_token_ids": IDS[3:9]}, CHUNKED, {"prompt_token_ids": IDS[8:31]}]
MOST = 256
NEWLINE_ENDS, NEWLINE = str(ROOT / "inputs" / "demo-model-reuse"), 201
TIGHT = {"max_num_batched_tokens": 16, "max_num_seqs": 8, **pages_for(560)}
ENGINES: list[dict[str, Any]] = [
    {"async_scheduling": False},
    {"async_scheduling": True},
    {"async_scheduling": True, **TIGHT},  # prompts in pieces, and requests that are preempted
]


def asked(form: StructuredOutputsParams, index: int, most: int = MOST) -> SamplingParams:
    """Every other request is greedy; the others differ in their settings."""
    if index % 2 == 0:
        return greedy(most, structured_outputs=form)
    others: list[dict[str, Any]] = [{}, {"top_k": 20, "repetition_penalty": 1.2}, {"top_p": 0.9, "temperature": 2.0}]
    return sampled(most, seed=index, structured_outputs=form, **others[index // 2 % 3])


@hypothesis_settings(max_examples=6)
@given(st.lists(FORMS, min_size=3, max_size=5))
def test_answers_have_their_forms_and_no_way_of_computing_changes_them(forms: list[Form]) -> None:
    prompts = [PROMPTS[index % 3] for index in range(len(forms))] + [PROMPTS[0]]
    params = [asked(form.params, index) for index, form in enumerate(forms)] + [sampled(20, seed=5)]
    answers = []
    for arguments in ENGINES:
        with engine(MODEL, enable_blending=True, **arguments) as llm:
            outputs = run(llm, prompts, params)
        for form, output in zip(forms, outputs, strict=False):
            [completion] = output.outputs
            assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
            form.judge(completion.text)
        answers.append(tokens_of(outputs))
    if settings.current().exact:
        assert answers[0] == answers[1] == answers[2]


@hypothesis_settings(max_examples=4)
@given(st.lists(FORMS, min_size=3, max_size=4))
def test_drafts_change_nothing(forms: list[Form]) -> None:
    prompts = [PROMPTS[0], PROMPTS[2], {"prompt_token_ids": IDS[30:33]}, {"prompt_token_ids": IDS[20:45]}]
    prompts = prompts[: len(forms)]
    params = [asked(form.params, index) for index, form in enumerate(forms)]
    with engine(MODEL) as llm:
        expected = run(llm, prompts, params)
    for method in (ORACLE, "ngram"):
        with speculating(MODEL, method) as llm:
            oracle = oracle_of(llm)
            if oracle is not None:
                oracle.answers.update(
                    (tuple(prompt["prompt_token_ids"]), list(output.outputs[0].token_ids))
                    for prompt, output in zip(prompts, expected, strict=True)
                )
            outputs = run(llm, prompts, params)
            accepted = counts(llm)[2]
        for form, output in zip(forms, outputs, strict=True):
            form.judge(output.outputs[0].text)
        if settings.current().exact:
            assert tokens_of(outputs) == tokens_of(expected)
            longest = max(map(len, tokens_of(expected)))
            assert method != ORACLE or longest < 12 or accepted > 0


def test_every_completion_and_batch_mate_is_as_it_is_alone() -> None:
    form = StructuredOutputsParams(regex="[a-c]{3}(?:é|-\\d){1,3}")
    several = SamplingParams(n=3, seed=4, max_tokens=MOST, structured_outputs=form)
    mates = [sampled(20, seed=1, logprobs=1), greedy(20, ignore_eos=True)]
    with engine(MODEL) as llm:
        [output] = run(llm, PROMPTS[0], several)
        alone = [run(llm, PROMPTS[2], mate)[0] for mate in mates]
        together = run(llm, [PROMPTS[0], PROMPTS[2], PROMPTS[2]], [several, *mates])
    texts = [completion.text for completion in output.outputs]
    assert len(set(texts)) > 1 and all(re.fullmatch(form.regex or "", text) for text in texts)
    if settings.current().exact:
        assert tokens_of(together) == [*tokens_of([output]), *tokens_of(alone)]


def test_log_probabilities_are_the_models_own() -> None:
    """The first token's are those of a request without a form: they are taken before the mask."""
    with engine(MODEL) as llm:
        [free] = run(llm, PROMPTS[0], greedy(1, logprobs=-1))
        [held] = run(llm, PROMPTS[0], greedy(9, logprobs=2, structured_outputs=StructuredOutputsParams(regex="[XYZ]!")))
    assert free.outputs[0].logprobs is not None and held.outputs[0].logprobs is not None
    whole, first = free.outputs[0].logprobs[0], held.outputs[0].logprobs[0]
    chosen = held.outputs[0].token_ids[0]
    assert whole is not None and first is not None
    assert first[chosen].logprob == pytest.approx(whole[chosen].logprob, abs=1e-4 if settings.current().exact else 0.1)
    best = max(whole, key=lambda token: whole[token].logprob)
    assert best in first and best != chosen


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({}, ("stop", None), "aab"),
        ({"max_tokens": 2}, ("length", None), "aa"),
        ({"ignore_eos": True}, ("length", None), "aab"),  # only the end may follow the end
        ({"stop": ["b"]}, ("stop", "b"), "aa"),
    ],
)
def test_answers_end_where_the_form_does(options: dict[str, Any], reason: tuple[str, Any], text: str) -> None:
    params = greedy(**({"max_tokens": 12} | options), structured_outputs=StructuredOutputsParams(choice=["aab"]))
    with engine(MODEL) as llm:
        [completion] = run(llm, PROMPTS[0], params)[0].outputs
    assert (completion.text, (completion.finish_reason, completion.stop_reason)) == (text, reason)


def test_a_form_that_other_settings_leave_no_token_for_fails_alone() -> None:
    form = StructuredOutputsParams(choice=["a"])
    params = [greedy(8, structured_outputs=form, min_tokens=6), greedy(8, structured_outputs=form)]
    with engine(MODEL) as llm:
        failed, done = run(llm, [PROMPTS[0], PROMPTS[0]], params)
    assert "no token is left to choose from: structured_outputs" in str(failed.error)
    assert done.error is None and done.outputs[0].text == "a"


def test_grammars() -> None:
    lark = StructuredOutputsParams(grammar='start: "[" number ("," number){0,2} "]"\nnumber: /[1-9][0-9]?/')
    gbnf = StructuredOutputsParams(grammar='root ::= "<" digit digit? ">"\ndigit ::= [0-9]')
    params = [sampled(60, seed=seed, structured_outputs=form) for seed in range(3) for form in (lark, gbnf)]
    with engine(MODEL) as llm:
        texts = [output.outputs[0].text for output in run(llm, [PROMPTS[0]] * 6, params)]
    assert all(re.fullmatch(r"\[[1-9]\d?(,[1-9]\d?){0,2}\]", text) for text in texts[::2])
    assert all(re.fullmatch(r"<\d\d?>", text) for text in texts[1::2])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"regex": "a\n{2}b(\nc)?"}, "a\n\nb"),  # a newline may follow, and is the end
        ({"choice": ["\na\nb\n"]}, "\na\nb\n"),
        ({"json": {"const": {"a": [1]}}, "whitespace_pattern": "\n"}, '{\n"a"\n:\n[\n1\n]\n}'),
        ({"json": {"const": {"a": [1]}}, "disable_any_whitespace": True}, '{"a":[1]}'),
    ],
)
def test_a_newline_that_ends_texts_is_text_until_the_form_is_complete(form: dict[str, Any], text: str) -> None:
    """In the model whose generation config has the newline among its ends, with and without drafts."""
    params = greedy(40, structured_outputs=StructuredOutputsParams(**form), logit_bias={NEWLINE: 50.0})
    with engine(NEWLINE_ENDS) as llm:
        [expected] = run(llm, "Question:", params)
    with speculating(NEWLINE_ENDS, ORACLE) as llm:
        oracle = oracle_of(llm)
        assert oracle is not None
        # after the end, too
        [completion], prompt_token_ids = expected.outputs, expected.prompt_token_ids or []
        oracle.answers[tuple(prompt_token_ids)] = [*completion.token_ids, NEWLINE, NEWLINE, *completion.token_ids]
        [drafted] = run(llm, "Question:", params)
        assert counts(llm)[2] > 0
    for output in (expected, drafted):
        [completion] = output.outputs
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", None)
        assert completion.token_ids[-1] == NEWLINE


def test_real_words_and_blended_passages() -> None:
    """The demo model, whose answers are words, over passages that are reused."""
    form = StructuredOutputsParams(
        json={
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 20}, "sure": {"type": "boolean"}},
            "required": ["answer", "sure"],
        },
        disable_any_whitespace=True,
        disable_additional_properties=True,
    )
    with engine(enable_blending=True, async_scheduling=True, max_model_len=900, num_gpu_blocks_override=60) as llm:
        first, again = (run(llm, demo_prompt(1, 3), greedy(60, structured_outputs=form))[0] for _ in range(2))
        assert again.num_cached_tokens is not None and again.num_cached_tokens > 0
    for output in (first, again):
        Form(form).judge(output.outputs[0].text)
