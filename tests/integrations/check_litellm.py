"""LiteLLM's provider `hosted_vllm/`, against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from tests.integrations.hugging_face import MAX_TOKENS, PROMPTS, greedy, greedy_tokens
from tests.integrations.servers import NAME, QUESTION, REUSE_MODEL, ServerProcess, as_prompt

MODEL = f"hosted_vllm/{NAME}"
# Checks share a server: these passages are in no other file.
PASSAGES = [
    "Ostrava Mills makes paper.",
    "Ostrava Mills was founded in Belmar.",
]
MESSAGES = [{"role": "user", "content": QUESTION}]
SWITCH = {
    "type": "function",
    "function": {
        "name": "switch",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


class Switch(BaseModel):
    on: bool


@pytest.fixture
def asked(server: ServerProcess) -> dict[str, Any]:
    return {"model": MODEL, "api_base": server.base_url, "temperature": 0, "max_tokens": MAX_TOKENS, "num_retries": 0}


def test_completions(asked: dict[str, Any]) -> None:
    for prompt in PROMPTS:
        assert litellm.text_completion(prompt=prompt, **asked).choices[0].text == greedy(prompt, REUSE_MODEL)


def test_chats(asked: dict[str, Any]) -> None:
    """They end by themselves, before `max_tokens`."""
    expected, num_tokens = (
        greedy(as_prompt(QUESTION), REUSE_MODEL),
        len(greedy_tokens(as_prompt(QUESTION), REUSE_MODEL)),
    )
    answer = litellm.completion(messages=MESSAGES, **asked)
    assert answer.choices[0].message.content == expected and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == num_tokens < MAX_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens
    again = asyncio.run(litellm.acompletion(messages=MESSAGES, **asked))
    assert again.choices[0].message.content == expected


def test_streams_end_with_the_usage(asked: dict[str, Any]) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=MESSAGES, **options, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == greedy(as_prompt(QUESTION), REUSE_MODEL)
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    usages = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert [usage.completion_tokens for usage in usages] == [len(greedy_tokens(as_prompt(QUESTION), REUSE_MODEL))]


def test_documents_are_reused_in_another_order(asked: dict[str, Any]) -> None:
    """Fields that OpenAI does not have go through as they are."""
    counts = []
    for documents in (PASSAGES, PASSAGES[::-1]):
        answer = litellm.completion(messages=MESSAGES, documents=documents, **asked)
        counts.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert counts[1] > counts[0]


def test_forced_calls_and_schemas(asked: dict[str, Any]) -> None:
    asked["max_tokens"] = 50
    choice = {"type": "function", "function": {"name": "switch"}}
    answer = litellm.completion(messages=MESSAGES, tools=[SWITCH], tool_choice=choice, **asked)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "switch" and Switch.model_validate_json(call.function.arguments)
    answer = litellm.completion(messages=MESSAGES, response_format=Switch, **asked)
    assert Switch.model_validate_json(answer.choices[0].message.content)


def test_errors_are_those_of_litellm(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError, match="the model 'other' does not exist"):
        litellm.completion(messages=MESSAGES, **asked | {"model": "hosted_vllm/other"})
    with pytest.raises(litellm.BadRequestError, match="maximum context length is 1024"):
        litellm.completion(messages=MESSAGES, **asked | {"max_tokens": 5000})
