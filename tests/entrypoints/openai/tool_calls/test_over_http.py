"""Reasoning and tool calls of a model's own choice over HTTP, put together by the clients of OpenAI and Anthropic.

A grammar holds the model to the answer that each test needs; the endpoints and the output parsers are as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from tests.entrypoints.openai.servers import NAME, TestServer, serving

pytestmark = pytest.mark.cpu_only

THOUGHT, CONTENT = "Hm.", "So:"
CALLS: list[tuple[str, dict[str, Any]]] = [("find", {"a": "é", "b": [1]}), ("add", {"a": "}"})]
ARGUMENTS = [json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS]
# What models of each family write, by the names of the parsers.
FORMATS = {
    "hermes": "\n".join('<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>' for _ in CALLS),
    "llama3_json": "<|python_tag|>" + "; ".join('{{"name": "{}", "parameters": {}}}' for _ in CALLS),
    "mistral": "[TOOL_CALLS] [" + ", ".join('{{"name": "{}", "arguments": {}}}' for _ in CALLS) + "]",
}
TEXTS = {
    name: f"<think>\n{THOUGHT}\n</think>\n\n{CONTENT}\n"
    + calls.format(CALLS[0][0], ARGUMENTS[0], CALLS[1][0], ARGUMENTS[1])
    for name, calls in FORMATS.items()
}
FUNCTIONS: Any = [
    {"name": name, "parameters": {"type": "object", "properties": {key: {} for key in arguments}}}
    for name, arguments in CALLS
]
QUESTION = "Will it rain?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"strict": True, **function}} for function in FUNCTIONS]
CHAT: Any = {"model": NAME, "messages": MESSAGES, "tools": TOOLS}

Answer = Callable[[str], None]


@pytest.fixture
def answer(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Make the engine answer every request with this text."""

    def hold(text: str) -> None:
        monkeypatch.setitem(server.engine.default_sampling_settings, "structured_outputs", {"choice": [text]})

    return hold


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)


def at_once(*requests: Callable[[], Any]) -> list[Any]:
    """Send requests together, so that the engine answers them in the same steps. Return what each gives."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return [future.result() for future in [pool.submit(request) for request in requests]]


def called(message: Any) -> list[tuple[str, str]]:
    assert all(call.type == "function" and call.id for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


@pytest.mark.parametrize("form", FORMATS)
def test_chat_completions(server: TestServer, answer: Answer, form: str) -> None:
    """The pieces of a stream, put together by the client, are the whole message."""

    def streamed() -> tuple[list[Any], Any]:
        with client.chat.completions.stream(**CHAT) as stream:
            chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk"]
            return chunks, stream.get_final_completion()

    answer(TEXTS[form])
    with serving(server.engine, tool_call_parser=form, reasoning_parser="qwen3") as url:
        client = openai_client(url)
        whole, (chunks, joined) = at_once(lambda: client.chat.completions.create(**CHAT), streamed)
    for completion in (whole, joined):
        [choice] = completion.choices
        message = choice.message
        assert message.reasoning_content == message.reasoning == THOUGHT and message.content == CONTENT
        assert [(name, json.loads(arguments)) for name, arguments in called(message)] == CALLS
        assert choice.finish_reason == "tool_calls"
    assert called(joined.choices[0].message) == called(whole.choices[0].message)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    for index in range(len(CALLS)):  # a call comes in several pieces, and the first alone says whose they are
        pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or () if call.index == index]
        heads = [bool(call.id and call.function.name) for call in pieces]
        assert len(pieces) > 2 and heads == [True] + [False] * (len(pieces) - 1)


def test_no_call(server: TestServer, answer: Answer) -> None:
    """An answer without calls stops as any other, and calls that may not be made are content."""
    call = '<tool_call>{"name": "add"}</tool_call>'
    with serving(server.engine, tool_call_parser="hermes", reasoning_parser="qwen3") as url:
        client = openai_client(url)
        for rest, choose in (("", "auto"), (call, "none")):
            asked = CHAT | {"tool_choice": choose}
            answer(f"<think>{THOUGHT}</think>{CONTENT}{rest}")
            [choice] = client.chat.completions.create(**asked).choices
            message: Any = choice.message
            assert message.reasoning_content == THOUGHT and message.content == CONTENT + rest
            assert message.tool_calls is None and choice.finish_reason == "stop"


def test_responses_and_messages(server: TestServer, answer: Answer) -> None:
    """Reasoning, text and calls are items of a response and blocks of a message, whole and streamed."""

    def streamed_response() -> Any:
        with client.responses.stream(**openai_body) as stream:
            return stream.get_final_response()

    def streamed_message() -> Any:
        with claude.messages.stream(**claude_body) as stream:
            return stream.get_final_message()

    functions = [{"type": "function", "strict": True, **function} for function in FUNCTIONS]
    openai_body: Any = {"model": NAME, "input": QUESTION, "tools": functions}
    tools = [{"name": function["name"], "input_schema": function["parameters"]} for function in FUNCTIONS]
    claude_body: Any = {"model": NAME, "max_tokens": 400, "messages": MESSAGES, "tools": tools}
    answer(TEXTS["hermes"])
    with serving(server.engine, tool_call_parser="hermes", reasoning_parser="qwen3") as url:
        client = openai_client(url)
        claude = anthropic.Anthropic(base_url=url, api_key="none", _strict_response_validation=True, max_retries=0)
        answers = at_once(
            lambda: client.responses.create(**openai_body),
            streamed_response,
            lambda: claude.messages.create(**claude_body),
            streamed_message,
        )
    for response in answers[:2]:
        reasoning, text, *items = response.output
        assert (reasoning.type, text.type, response.status) == ("reasoning", "message", "completed")
        assert [part.text for part in reasoning.content] == [THOUGHT] and response.output_text == CONTENT
        assert all(item.type == "function_call" and item.call_id for item in items)
        assert [(item.name, json.loads(item.arguments)) for item in items] == CALLS
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert answers[0].usage.output_tokens_details == answers[1].usage.output_tokens_details
    for message in answers[2:]:
        thinking, text, *uses = message.content
        assert (thinking.type, text.type, message.stop_reason) == ("thinking", "text", "tool_use")
        assert (thinking.thinking, text.text) == (THOUGHT, CONTENT)
        assert all(use.type == "tool_use" and use.id for use in uses)
        assert [(use.name, use.input) for use in uses] == CALLS
