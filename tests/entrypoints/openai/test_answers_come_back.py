"""The server accepts what it has written: every answer, appended unchanged, is a turn of the next request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chunks.templates import PUBLISHED
from tests.engine.tiny_tokenizers import byte_level
from vllm_blend.chunks.chat_prompt import chat_prompts
from vllm_blend.chunks.chat_template import make_chat_template
from vllm_blend.chunks.messages import parse_conversations
from vllm_blend.entrypoints.openai import messages as anthropic
from vllm_blend.entrypoints.openai import messages_request, responses, responses_request
from vllm_blend.entrypoints.openai.blocks import BlockReader
from vllm_blend.entrypoints.openai.output_parser import OutputParsers, check_output_parsers
from vllm_blend.entrypoints.openai.protocol.chat import ChatMessage
from vllm_blend.entrypoints.openai.protocol.messages import MessagesRequest
from vllm_blend.entrypoints.openai.protocol.responses import ResponsesRequest
from vllm_blend.entrypoints.openai.tool_calls.tool_choice import parse_tool_choice, parse_tools
from vllm_blend.inputs import ParsedPrompt

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "add")]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '{"name": "weather", "arguments": {"city": "Jorholm"}}'
TEXTS = {
    "hermes": [
        "<think>\nHm.\n</think>\n\n",
        "I look.\n",
        f"<tool_call>\n{CALL}\n</tool_call>\n",
        "\n",
        '"\\ud800',
        "]",
    ],
    "llama3_json": [
        "<|python_tag|>",
        CALL.replace("arguments", "parameters"),
        "; ",
        "Sunny.",
        "<think>Hm.",
        "</think>",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        f"[{CALL}]",
        "weather[ARGS]",
        '{"city": "J"}',
        "Sunny.",
        "[CALL_ID]",
        "<think>a</think>",
    ],
    "required": [f"[{CALL.replace('arguments', 'parameters')}", ", ", CALL.replace("arguments", "parameters"), "]"],
    "named": ['{"city":', ' "Jorholm"', '"\\ud800"', "}", "[1, 2]", "NaN", '{"a": NaN}'],
}
CHOICES: dict[str, Any] = {"required": "required", "named": NAMED}


@st.composite
def answers(draw: Any) -> tuple[OutputParsers, str]:
    """An answer in a tool format, free or forced, whole or cut anywhere, of what models write and of other things."""
    kind = draw(st.sampled_from(list(TEXTS)))
    text = "".join(draw(st.lists(st.sampled_from(TEXTS[kind]), max_size=5)))
    text = text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text
    choice = parse_tool_choice(CHOICES.get(kind, "auto"), parse_tools(TOOLS), None)
    return check_output_parsers(choice, kind if kind not in CHOICES else "hermes", "qwen3"), text


def as_chat(parsers: OutputParsers, text: str) -> list[dict[str, Any]]:
    message = ChatMessage.model_validate(
        {"role": "assistant", **parsers.make(None).parse(text).to_dict(), "refusal": None}
    )
    answer = json.loads(message.model_dump_json(exclude_unset=True))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"} for call in answer.get("tool_calls") or ()
    ]
    return [{"role": "user", "content": "Hello?"}, answer, *results]


def blocks(parsers: OutputParsers, text: str) -> list[Any]:
    reader = BlockReader(parsers.make(None))
    for _ in reader.feed(text, True):
        pass
    return reader.blocks


def as_messages(parsers: OutputParsers, text: str) -> list[dict[str, Any]]:
    content = json.loads(json.dumps([anthropic._content(block) for block in blocks(parsers, text)]))
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "21 degrees"}
        for block in content
        if block["type"] == "tool_use"
    ]
    turns = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": content}]
    turns += [{"role": "user", "content": results}] if results else []
    body = MessagesRequest.model_validate({"messages": [*turns, *_asks(results)], "max_tokens": 1})
    return messages_request.as_chat(body).messages


def as_input(parsers: OutputParsers, text: str) -> list[dict[str, Any]]:
    writer: Any = SimpleNamespace(id="resp_1", _text_part=lambda block: responses._text_part(block.text, []))
    items = [responses._Answer._item(writer, block, "completed") for block in blocks(parsers, text)]
    items = json.loads(json.dumps(items))
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "21 degrees"}
        for item in items
        if item["type"] == "function_call"
    ]
    given = [{"role": "user", "content": "Hello?"}, *items, *results, *_asks(results)]
    return responses_request.as_chat(ResponsesRequest.model_validate({"input": given})).messages


def _asks(results: list[Any]) -> list[dict[str, Any]]:
    """The next turn: the results of calls, or else a question."""
    return [] if results else [{"role": "user", "content": "Why?"}]


def render(messages: list[dict[str, Any]], template: str) -> str:
    made = make_chat_template(byte_level(), template, "auto", TOOLS, None, True, False)
    [prompt] = chat_prompts(made, parse_conversations(messages), True, 1 << 16)
    assert isinstance(prompt, ParsedPrompt) and prompt.text is not None
    return prompt.text


NO_TOOLS = ("llama2", "mistral_v1", "mixtral", "gemma3")  # whose templates have no place for results


@given(answers(), st.sampled_from([name for name in PUBLISHED if name not in NO_TOOLS]))
def test_every_answer_is_a_turn_of_the_next_request(answer: tuple[OutputParsers, str], name: str) -> None:
    parsers, text = answer
    chat = as_chat(parsers, text)
    for messages in ([*chat, *_asks(chat[2:])], as_messages(parsers, text), as_input(parsers, text)):
        shown = render(messages, PUBLISHED[name])
        assert "Hello?" in shown and ("21 degrees" if len(chat) > 2 else "Why?") in shown
        assert "None" not in shown


@given(st.sampled_from(["<think>Hm.", "<think>Hm.</think>Sunny.", "", "Sunny."]), st.sampled_from(NO_TOOLS))
def test_every_answer_without_calls_is_a_turn_for_strict_templates(text: str, name: str) -> None:
    parsers = check_output_parsers(parse_tool_choice(None, ()), None, "qwen3")
    for messages in ([*as_chat(parsers, text), *_asks([])], as_messages(parsers, text), as_input(parsers, text)):
        assert "Why?" in render(messages, PUBLISHED[name])


@pytest.mark.parametrize("arguments", ['{"city":"', "[1]", "1", '"\\ud800"', "[" * 100_000, "{" * 5])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]
    [[_, message, _]] = parse_conversations([messages])
    assert message.fields["tool_calls"][0]["function"]["arguments"] == {"INVALID_JSON": arguments}


def test_several_calls_are_several_messages_where_a_template_takes_one_call_each() -> None:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}}
        for n in (1, 2)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_2", "content": "second"},
        {"role": "tool", "tool_call_id": "call_1", "content": "first"},
    ]
    shown = render(messages, PUBLISHED["llama3_1"])
    order = [shown.index(text) for text in ('{"a": 1}', "first", '{"a": 2}', "second")]
    assert order == sorted(order)
