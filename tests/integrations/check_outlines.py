"""outlines' `from_vllm_offline`: plain generation, and answers of an output type."""

from __future__ import annotations

import re
from typing import Literal

import outlines
import pytest
from outlines.inputs import Chat
from outlines.models.vllm_offline import VLLMOffline
from outlines.types import Regex
from pydantic import BaseModel, Field
from vllm import LLM, SamplingParams

from tests.integrations.hugging_face import MAX_TOKENS, MODEL, PROMPTS, greedy


class Answer(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)
    kind: Literal["fox", "dog"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    # A small model likes to go on with spaces, and with properties of its own.
    config = {"disable_any_whitespace": True, "disable_additional_properties": True}
    return LLM(MODEL, max_model_len=256, structured_outputs_config=config)


@pytest.fixture
def params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.fixture
def model(llm: LLM) -> VLLMOffline:
    return outlines.from_vllm_offline(llm)


def test_texts_are_those_of_hugging_face(model: VLLMOffline, params: SamplingParams) -> None:
    expected = [greedy(prompt) for prompt in PROMPTS]
    assert [model(prompt, sampling_params=params) for prompt in PROMPTS] == expected
    assert model.batch(PROMPTS, sampling_params=params) == [[text] for text in expected]


def test_prompts_go_through_the_chat_template(
    llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", "<s>" + template)
    model = outlines.from_vllm_offline(llm)
    chat = Chat([{"role": "user", "content": PROMPTS[1]}])
    assert [model(prompt, sampling_params=params) for prompt in (PROMPTS[1], chat)] == [greedy(PROMPTS[1])] * 2


def test_answers_have_the_output_type(model: VLLMOffline, params: SamplingParams) -> None:
    text = model(PROMPTS[0], Answer, sampling_params=SamplingParams(max_tokens=100, seed=3))
    assert Answer.model_validate_json(text).kind in ("fox", "dog")
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", model(PROMPTS[0], Regex(r"[0-9]{3}-[a-f]{2}"), sampling_params=params))
    [first], [second] = model.batch(PROMPTS[:2], Literal["yes", "no"], sampling_params=params)
    assert {first, second} <= {"yes", "no"}
    with pytest.raises(NotImplementedError, match="Streaming is not available"):  # in the words of outlines
        next(model.stream(PROMPTS[0], sampling_params=params))
