"""outlines' `from_vllm_offline`: plain generation; an output type is refused."""

from __future__ import annotations

import outlines
import pytest
from outlines.inputs import Chat
from outlines.models.vllm_offline import VLLMOffline
from pydantic import BaseModel
from vllm import LLM, SamplingParams

from tests.integrations.hugging_face import MAX_TOKENS, MODEL, PROMPTS, greedy


class Answer(BaseModel):
    name: str


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, max_model_len=256)


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


@pytest.mark.parametrize("settings", [{}, {"sampling_params": SamplingParams(max_tokens=4)}])
def test_an_output_type_is_refused(model: VLLMOffline, settings: dict[str, SamplingParams]) -> None:
    with pytest.raises(NotImplementedError, match="structured outputs come with a later release"):
        model(PROMPTS[0], Answer, **settings)
    with pytest.raises(NotImplementedError, match="Streaming is not available"):  # in the words of outlines
        next(model.stream(PROMPTS[0], **settings))
