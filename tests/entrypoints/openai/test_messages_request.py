"""What a request to /v1/messages asks to have stored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chunks.test_chat import CHATML_LIKE
from tests.chunks.test_chat_prompt import LISTS
from tests.engine.tiny_tokenizers import byte_level
from tests.entrypoints.openai.passages.prompts import PASSAGES, chat, chunk_texts
from vllm_blend.chunks.chat_prompt import chat_prompts
from vllm_blend.chunks.chat_template import make_chat_template
from vllm_blend.chunks.messages import parse_conversations
from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.messages_request import as_chat
from vllm_blend.entrypoints.openai.passages import PassageFinder
from vllm_blend.entrypoints.openai.protocol.messages import MessagesRequest
from vllm_blend.inputs import ParsedPrompt

SHORT: Any = {"cache_control": {"type": "ephemeral"}}
LONG: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CALL = {"type": "tool_use", "id": "a", "name": "search", "input": {}}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def prompt(template: str, *contents: Any, **fields: Any) -> ParsedPrompt:
    """Return the prompt of a conversation that the user begins."""
    roles = ("user", "assistant") * len(contents)
    messages: Any = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return chat(
        PassageFinder(min_characters=16), as_chat(MessagesRequest(messages=messages, **fields)).messages, template
    )


def test_blocks_that_are_to_be_stored() -> None:
    """Each passage is kept for as long as its block says, or a block of its content."""
    source = {"type": "content", "content": [text(PASSAGES[1], **LONG), text(PASSAGES[2])]}
    blocks = [
        text(PASSAGES[0]),
        {"type": "document", "source": source, **SHORT},
        {"type": "search_result", "source": "a", "title": "Code", "content": [text(PASSAGES[3])], **LONG},
        text("Who jumps?", **LONG),
    ]
    made = prompt(LISTS, blocks)
    assert chunk_texts(made) == [*PASSAGES[:3], f"Code\n{PASSAGES[3]}"]
    assert made.retention == (0, 3600, 300, 3600)


@pytest.mark.parametrize("own, whole, seconds", [(SHORT, {}, (300,)), ({}, LONG, (3600,)), (SHORT, LONG, (300,))])
def test_results_of_tools_and_the_mark_of_the_request(own: Any, whole: Any, seconds: tuple[int, ...]) -> None:
    """The request's own mark is for its last block, unless that has one. A marked result of a tool is stored now."""
    template = CHATML_LIKE.replace("m['content']", "(m['content'] or '')")
    result = {"type": "tool_result", "tool_use_id": "a", "content": PASSAGES[0], **own}
    made = prompt(template, "Who jumps?", [CALL], [result], **whole)
    assert chunk_texts(made) == PASSAGES[:1] and made.retention == seconds
    assert prompt(template, "Who jumps?", [CALL], [{**result, "cache_control": None}]).chunk_bounds == ()


@pytest.mark.parametrize("mark", [{"type": "persistent"}, {"type": "ephemeral", "ttl": "2d"}, {"ttl": "5m"}])
def test_marks_of_the_request_that_cannot_be(mark: dict[str, Any]) -> None:
    with pytest.raises(APIError, match=r"400: cache_control is .*: give {'type': 'ephemeral'}"):
        prompt(LISTS, "Who jumps?", cache_control=mark)


THOUGHT = {"type": "thinking", "thinking": "a"}
SAILOR = {"role": "user", "content": "Who?"}


def as_body(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"messages": [*messages], "max_tokens": 1} | fields)


@pytest.mark.parametrize("content", ["The sailor", [text("The"), text(" sailor")]])
@pytest.mark.parametrize("template", [CHATML_LIKE, LISTS])
def test_a_final_message_of_the_assistant_is_the_beginning_of_the_answer(template: str, content: Any) -> None:
    body = as_chat(as_body(SAILOR, {"role": "assistant", "content": content}))
    assert body.continue_final_message
    made = make_chat_template(byte_level(), template, "auto", None, None, False, True)
    [made_prompt] = chat_prompts(made, parse_conversations(body.messages), True, 4096)
    assert isinstance(made_prompt, ParsedPrompt) and made_prompt.text is not None
    assert made_prompt.text.endswith("sailor") and made_prompt.text.count("The") == 1
    assert not as_chat(as_body(SAILOR)).continue_final_message


def test_an_empty_beginning_is_none() -> None:
    chat_body = as_chat(as_body(SAILOR, {"role": "assistant", "content": ""}))
    assert [message["role"] for message in chat_body.messages] == ["user"] and not chat_body.continue_final_message


@pytest.mark.parametrize(
    ("messages", "fields", "error"),
    [
        ([SAILOR, {"role": "assistant", "content": "The "}], {}, r"messages\[1\] is the beginning .* ends with white"),
        ([SAILOR, {"role": "assistant", "content": [CALL]}], {}, r"messages\[1\] ends with tool_use"),
        (
            [SAILOR, {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}]}],
            {},
            "thinking and no text",
        ),
        (
            [SAILOR, {"role": "assistant", "content": "The"}],
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
            "tool_choice demands",
        ),
        ([SAILOR], {"output_config": {"format": {"type": "text"}}}, r"output_config\.format is"),
        ([SAILOR], {"output_format": {"type": "json_schema"}}, "output_format is"),
        ([SAILOR], {"output_config": {"length": 4}}, r"output_config\.length is not supported"),
        (
            [{"role": "user", "content": [{"type": "document", "citations": {"enabled": True}}]}],
            {},
            r"content\[0\]\.citations is not supported",
        ),
    ],
)
def test_what_would_be_lost_is_refused(messages: list[Any], fields: dict[str, Any], error: str) -> None:
    with pytest.raises(APIError, match=f"400: .*{error}"):
        as_chat(as_body(*messages, **fields))


def test_fields_that_change_an_answer_are_translated() -> None:
    schema = {"type": "object"}
    made = as_chat(
        as_body(SAILOR, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    )
    assert made.response_format is not None and made.response_format.json_schema == {"schema": schema}
    assert made.reasoning_effort == "low"
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no such city", "is_error": True}
    assert as_chat(as_body({"role": "user", "content": [result]})).messages[0]["content"] == [
        text("Error: no such city")
    ]
    for edits in ({"edits": [{"type": "clear_tool_uses_20250919"}]}, {"edits": 1}):
        with pytest.raises(ValueError, match=r"context_management=.* is not supported"):
            as_body(SAILOR, context_management=edits)
    source = {"type": "text", "data": "Text."}
    document = {"type": "document", "source": source, "title": "T", "context": "From 1900."}
    [message] = as_chat(as_body({"role": "user", "content": [document]})).messages
    assert message["content"] == [text("T\nFrom 1900.\nText.")]


@pytest.mark.parametrize(
    "last", [{"content": None}, {"content": ""}, {"content": "I look."}, {"content": "", "tool_calls": []}]
)
def test_only_a_text_is_continued(last: dict[str, Any]) -> None:
    """Calls would be dropped with what the template writes behind the text."""
    called = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [called], **last}
    made = make_chat_template(byte_level(), CHATML_LIKE, "auto", None, None, False, True)
    with pytest.raises(ValueError, match=r"continue_final_message: the final message has (tool calls|no text)"):
        chat_prompts(made, parse_conversations([SAILOR, message]), False, 4096)
