"""LlamaIndex' `Vllm` of llama-index-llms-vllm."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.llms.vllm import Vllm

from tests.integrations.hugging_face import MAX_TOKENS, MODEL, PROMPTS, greedy


@pytest.fixture(scope="module")
def llm() -> Vllm:
    # swap_space stands in the example of its documentation
    options = {"swap_space": 1, "gpu_memory_utilization": 0.5, "max_model_len": 256}
    return Vllm(model=MODEL, max_new_tokens=MAX_TOKENS, temperature=0.0, vllm_kwargs=options)


def test_texts_are_those_of_hugging_face(llm: Vllm) -> None:
    for prompt in PROMPTS:
        expected = greedy(prompt)
        assert llm.complete(prompt).text == expected
        assert asyncio.run(llm.acomplete(prompt)).text == expected
    messages = [ChatMessage(role="user", content="Who runs the town hall?")]
    assert llm.chat(messages).message.content == greedy(llm.messages_to_prompt(messages))


def test_what_does_not_exist_is_refused(llm: Vllm) -> None:
    with pytest.raises(ValueError, match="Not Implemented"):  # LlamaIndex' own words
        llm.stream_complete(PROMPTS[0])
    with pytest.raises(ValueError, match="best_of=3 is not supported: give n"):
        llm.complete(PROMPTS[0], best_of=3)
