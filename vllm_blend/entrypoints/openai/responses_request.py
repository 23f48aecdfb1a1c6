"""From the items of a Responses request to a chat."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm_blend.entrypoints.openai.errors import bad_request
from vllm_blend.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm_blend.entrypoints.openai.protocol.responses import LOGPROBS, ResponsesRequest

logger = logging.getLogger(__name__)

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "ignore_eos",
    "parallel_tool_calls",
    "stream",
    "blend",
    "cache_salt",
    "chat_template_kwargs",
    "documents",
    "priority",
    "vllm_xargs",
)


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """Return the chat request that a request to /v1/responses stands for. Raises APIError (400)."""
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat |= {
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "response_format": _response_format(body.text or {}),
    }
    if LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    elif body.top_logprobs:
        raise bad_request(
            f"top_logprobs={body.top_logprobs} needs include=[{LOGPROBS!r}]: give both, or neither", "top_logprobs"
        )
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    return ChatCompletionRequest(**chat)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        name, kind = f"input[{index}]", item.get("type", "message")
        if kind == "message" and item.get("role") == "assistant":
            own = _own_message(messages)
            content = item.get("content")
            if isinstance(content, str):
                content = [{"type": "output_text", "text": content}]
            own["content"] = [*own["content"], *content] if own["content"] and content else content or own["content"]
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "reasoning":
            _add_reasoning(messages, item)
        elif kind == "function_call_output":
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(output)
        else:
            raise bad_request(
                f"{name}.type={kind!r} is not supported: use message, reasoning, function_call and "
                "function_call_output items",
                name,
            )
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add a call to the assistant's message, which calls share that were made at once."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    _own_message(messages).setdefault("tool_calls", []).append(call)


def _add_reasoning(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add reasoning to the assistant's message, as the text of its content, or else of its summary."""
    for parts in (item.get("content"), item.get("summary")):
        texts = [part.get("text") for part in parts or () if isinstance(part, Mapping)]
        if text := "\n".join(each for each in texts if isinstance(each, str)):
            own = _own_message(messages)
            own["reasoning_content"] = "\n".join(filter(None, (own.get("reasoning_content"), text)))
            return


def _own_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message at the end, which all items of one answer share."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _tool(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_request(f"{name}.type={tool.get('type')!r} is not supported: this server calls functions alone", name)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        return {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    if text.get("verbosity") is not None:
        logger.warning(
            "text.verbosity=%.50r is ignored: say in a message how long the answer is to be", text["verbosity"]
        )
    given = text.get("format")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise bad_request(f"text.format is {given!r}: give an object with a type", "text.format")
    if given.get("type") != "json_schema":
        return {"type": given.get("type")}
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}
