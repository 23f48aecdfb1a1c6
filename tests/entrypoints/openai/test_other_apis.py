"""OpenAI's Responses and Anthropic's Messages, by their own clients, which check every answer against their types; and
answers of a form, in all three chat endpoints."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.entrypoints.openai.servers import NAME, TEMPLATE, TestServer
from vllm_blend import LLM, SamplingParams

pytestmark = pytest.mark.cpu_only

MAKER, PLACE = "Tulmaris Works makes lenses.", "Tulmaris Works was founded in Jorholm."
QUESTION = "Question: What does Tulmaris Works make?"
GREEDY: Any = {"temperature": 0}
SCHEMA: Any = {
    "type": "object",
    "properties": {"maker": {"enum": ["Tulmaris", "Works"]}},
    "required": ["maker"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "find", "parameters": SCHEMA}


@pytest.fixture(scope="module")
def client(server: TestServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)


@pytest.fixture(scope="module")
def claude(server: TestServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", _strict_response_validation=True, max_retries=0)


def expected(offline: LLM, messages: Any) -> str:
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = offline.chat(messages, params, use_tqdm=False, chat_template=TEMPLATE)
    return output.outputs[0].text


def test_responses(client: openai.OpenAI, offline: LLM) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    asked: Any = {"model": NAME, "instructions": MAKER, "max_output_tokens": 8, "extra_body": GREEDY}
    answer = client.responses.create(input=QUESTION, **asked)
    text = expected(offline, [{"role": "system", "content": MAKER}, {"role": "user", "content": QUESTION}])
    assert answer.output_text == text and answer.status == "completed"
    assert (
        answer.usage is not None and answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    )
    with client.responses.stream(input=parts, **asked) as stream:
        numbers = [event.sequence_number for event in stream]
        assert stream.get_final_response().output_text == text
    assert numbers == list(range(len(numbers)))
    for refused in ({"previous_response_id": "resp_1"}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="keeps no state"):
            client.responses.create(model=NAME, input="a", **refused)


def test_messages(claude: anthropic.Anthropic, offline: LLM) -> None:
    """Documents and search results are passages: they are reused in another order."""
    passages: Any = [
        {
            "type": "document",
            "source": {"type": "text", "media_type": "text/plain", "data": PLACE},
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
        {"type": "search_result", "source": "a", "title": "Tulmaris", "content": [{"type": "text", "text": MAKER}]},
    ]
    text = {"type": "text", "text": QUESTION}
    asked: Any = {"model": NAME, "max_tokens": 8, "extra_body": {"temperature": 0}}
    user = [PLACE, f"Tulmaris\n{MAKER}", QUESTION]
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": each} for each in user]}]
    asking: Any = [{"role": "user", "content": [*passages, text]}]
    answer = claude.messages.create(messages=asking, **asked)
    [block] = answer.content
    assert block.type == "text" and block.text == expected(offline, messages)
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    answer = claude.messages.create(messages=asking, stop_sequences=["ses"], **asked)
    [first] = answer.content
    assert first.type == "text" and first.text == block.text.partition("ses")[0] != block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "ses")
    again: Any = [{"role": "user", "content": [*passages[::-1], text]}]
    with claude.messages.stream(messages=again, **asked) as stream:
        final = stream.get_final_message()
    counted = claude.messages.count_tokens(model=NAME, messages=again).input_tokens
    usage = final.usage
    assert usage.cache_read_input_tokens and usage.cache_creation_input_tokens == 0
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    with pytest.raises(anthropic.BadRequestError, match="of type 'image'"):
        image: Any = {"type": "image"}
        claude.messages.create(messages=[{"role": "user", "content": [image]}], **asked)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].cache_control"):
        bad: Any = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "2d"}}
        claude.messages.create(messages=[{"role": "user", "content": [bad]}], **asked)


def test_required_calls(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "function": FUNCTION}
    asked: Any = {"model": NAME, "messages": messages, "tools": [tool], "tool_choice": "required", "temperature": 0}
    asked["parallel_tool_calls"] = False
    [choice] = client.chat.completions.create(max_tokens=100, **asked).choices
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "find"
    assert json.loads(call.function.arguments)["maker"] in ("Tulmaris", "Works")
    chunks = list(client.chat.completions.create(max_tokens=100, stream=True, **asked))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or []]
    assert pieces[0].type == "function" and pieces[0].id and pieces[0].function and pieces[0].function.name == "find"
    text = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert text == call.function.arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]

    function: Any = {"type": "function", "strict": True, **FUNCTION}
    response = client.responses.create(
        model=NAME,
        input=QUESTION,
        tools=[function],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=100,
    )
    [item] = response.output
    assert item.type == "function_call" and (item.name, item.arguments) == ("find", text)

    with claude.messages.stream(
        model=NAME,
        max_tokens=100,
        messages=messages,
        tools=[{"name": "find", "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0},
    ) as stream:
        final = stream.get_final_message()
    [block] = final.content
    assert block.type == "tool_use" and block.input == json.loads(text) and final.stop_reason == "tool_use"


def test_answers_of_a_form(client: openai.OpenAI) -> None:
    form: Any = {"structured_outputs": {"choice": ["lenses", "boats"]}}
    answer = client.completions.create(model=NAME, prompt=f"{MAKER}\n\n{QUESTION}\nAnswer: ", extra_body=form)
    assert answer.choices[0].text in ("lenses", "boats")
    with pytest.raises(openai.BadRequestError, match="give one of them"):
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "a"}],
            response_format={"type": "json_object"},
            extra_body=form,
        )
