"""What a request to /v1/messages asks to have stored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chunks.test_chat import CHATML_LIKE
from tests.chunks.test_chat_prompt import LISTS
from tests.entrypoints.openai.passages.prompts import PASSAGES, chat, chunk_texts
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
