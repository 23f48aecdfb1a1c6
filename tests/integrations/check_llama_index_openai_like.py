"""LlamaIndex' `OpenAILike` of llama-index-llms-openai-like, against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.integrations.hugging_face import MAX_TOKENS, PROMPTS, greedy
from tests.integrations.servers import NAME, QUESTION, REUSE_MODEL, ServerProcess, as_prompt

# Checks share a server: these passages are in no other file.
PASSAGES = [
    "Tulmaris Works makes lenses.",
    "Tulmaris Works was founded in Jorholm.",
]
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


def connect(server: ServerProcess, **arguments: Any) -> OpenAILike:
    options = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "context_window": 1024, **arguments}
    return OpenAILike(model=NAME, api_base=server.base_url, api_key="none", **options)


def test_completions(server: ServerProcess) -> None:
    llm = connect(server)
    for prompt in PROMPTS:
        expected = greedy(prompt, REUSE_MODEL)
        assert llm.complete(prompt).text == expected
        assert asyncio.run(llm.acomplete(prompt)).text == expected
        *_, last = llm.stream_complete(prompt)
        assert last.text == expected


def test_chats(server: ServerProcess) -> None:
    llm = connect(server, is_chat_model=True)
    expected = greedy(as_prompt(QUESTION), REUSE_MODEL)
    assert llm.chat(MESSAGES).message.content == expected
    assert asyncio.run(llm.achat(MESSAGES)).message.content == expected
    pieces = list(llm.stream_chat(MESSAGES))
    assert pieces[-1].message.content == expected == "".join(piece.delta or "" for piece in pieces)

    async def streamed() -> str:
        return "".join([piece.delta or "" async for piece in await llm.astream_chat(MESSAGES)])

    assert asyncio.run(streamed()) == expected


def test_documents_are_reused_in_another_order(server: ServerProcess) -> None:
    """The package joins text blocks by newlines; fields that OpenAI does not have go through as they are."""
    counts = []
    for documents in (PASSAGES, PASSAGES[::-1]):
        llm = connect(server, is_chat_model=True, additional_kwargs={"extra_body": {"documents": documents}})
        counts.append(llm.chat(MESSAGES).raw.usage.prompt_tokens_details.cached_tokens)
    assert counts[1] > counts[0]


def test_function_calls(server: ServerProcess) -> None:
    def set_size(size: bool) -> str:
        """Choose between large and small lenses."""
        return str(size)

    llm = connect(server, is_chat_model=True, is_function_calling_model=True, max_tokens=100)
    tool = FunctionTool.from_defaults(set_size)
    response = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = llm.get_tool_calls_from_response(response)
    assert calls and calls[0].tool_name == "set_size" and isinstance(calls[0].tool_kwargs["size"], bool)


def test_what_is_wrong_is_said(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        connect(server, is_chat_model=True, max_tokens=5000).chat(MESSAGES)
