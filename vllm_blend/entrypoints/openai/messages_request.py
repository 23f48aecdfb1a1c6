"""From Anthropic's messages to a chat: documents and search results become text parts, which are passages.

The `cache_control` of a block goes to the parts that it becomes: passages among them are kept for its `ttl`. That of
the request belongs to its last block, as in Anthropic's API.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_blend.entrypoints.openai.errors import bad_request
from vllm_blend.entrypoints.openai.protocol.chat import ChatCompletionRequest
from vllm_blend.entrypoints.openai.protocol.messages import AnthropicMessage, MessagesRequest

_TTLS = (None, "5m", "1h")


def as_chat(body: MessagesRequest) -> ChatCompletionRequest:
    """Return the chat request that a request to /v1/messages stands for. Raises APIError (400)."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text_parts(body.system, "system")})
    for index, message in enumerate(body.messages):
        messages += _as_messages(message, f"messages[{index}]")
    mark = _mark(body.cache_control, "cache_control")
    if mark and messages and isinstance(content := messages[-1]["content"], list):
        content[-1] = {**mark, **content[-1]}
    chat: dict[str, Any] = {
        "messages": messages,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
        "blend": body.blend,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "vllm_xargs": body.vllm_xargs,
        "chat_template_kwargs": _template_kwargs(body),
    }
    chat |= _output(body) | _prefill(body, messages)
    if body.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
        chat |= _tool_choice(body.tool_choice or {})
    return ChatCompletionRequest(**chat)


def _output(body: MessagesRequest) -> dict[str, Any]:
    """Return the form that the answer must have, and the effort."""
    config = body.output_config or {}
    if unknown := sorted(set(config) - {"format", "effort"}):
        raise bad_request(f"output_config.{unknown[0]} is not supported: give format and effort", "output_config")
    given = body.output_format if config.get("format") is None else config["format"]
    fields = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
    if given is None:
        return fields
    if (
        not isinstance(given, Mapping)
        or given.get("type") != "json_schema"
        or not isinstance(given.get("schema"), dict)
    ):
        name = "output_format" if config.get("format") is None else "output_config.format"
        raise bad_request(f"{name} is {given!r}: give {{'type': 'json_schema', 'schema': {{...}}}}", name)
    return fields | {"response_format": {"type": "json_schema", "json_schema": {"schema": given["schema"]}}}


def _prefill(body: MessagesRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Have a final message of the assistant continued: the answer goes on with its text. An empty one is taken out."""
    if not messages or messages[-1]["role"] != "assistant":
        return {}
    last, name = messages[-1], f"messages[{len(body.messages) - 1}]"
    if "tool_calls" in last:
        raise bad_request(f"{name} ends with tool_use: let a message with its tool_result follow", name)
    text = "".join(part["text"] for part in last["content"] or ())
    if not text and "reasoning_content" not in last:
        messages.pop()
        return {}
    if not text or text != text.rstrip():
        what = "has thinking and no text" if not text else "ends with white space"
        raise bad_request(f"{name} is the beginning of the answer, but {what}: end it with text, or leave it out", name)
    if (body.tool_choice or {}).get("type") in ("any", "tool"):
        raise bad_request(
            f"{name} is the beginning of the answer, but tool_choice demands that it be a call: leave one of them out",
            name,
        )
    return {"continue_final_message": True}


def _as_messages(message: AnthropicMessage, name: str) -> list[dict[str, Any]]:
    """Return the messages that one stands for: results of tools are messages of their own."""
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    fields: dict[str, Any] = {}
    thoughts: list[Any] = []
    for index, block in enumerate(blocks):
        place = f"{name}.content[{index}]"
        mark = _mark(block.get("cache_control"), f"{place}.cache_control")
        kind = block.get("type")
        if kind == "tool_use":
            call = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            fields.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": call})
        elif kind == "tool_result":
            content = [{**mark, **part} for part in _text_parts(block.get("content") or "", place)]
            if block.get("is_error") is True:  # templates have no field for it
                content = [{**part, "text": f"Error: {part['text']}"} for part in content[:1]] + content[1:]
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "thinking":
            thoughts.append(block.get("thinking"))
        elif kind != "redacted_thinking":
            parts += [{**mark, **part} for part in _passages(block, place)]
    if any(thoughts):
        fields["reasoning_content"] = "\n".join(str(each) for each in thoughts if each)
    own = {"role": message.role, "content": parts or None, **fields}
    return [*results, own] if parts or fields or not results else results


def _passages(block: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return a block of text, a document or a search result as text parts, the title on a line before the text."""
    kind = block.get("type")
    if isinstance(cited := block.get("citations"), Mapping) and cited.get("enabled"):
        raise bad_request(f"{name}.citations is not supported: ask for quotations in a message", f"{name}.citations")
    if kind == "text":
        return _text_parts([block], name)
    if kind == "search_result":
        content = block.get("content")
    elif kind == "document":
        source = block.get("source")
        given = source if isinstance(source, Mapping) else {}
        if given.get("type") not in ("text", "content"):
            raise bad_request(
                f"{name}.source.type={given.get('type')!r} is not supported: give 'text' or 'content'", name
            )
        content = given.get("data") if given["type"] == "text" else given.get("content")
    else:
        raise bad_request(
            f"{name} is of type {kind!r}, but this server takes text, document, search_result, tool_use and "
            "tool_result blocks",
            name,
        )
    title = "\n".join(each for each in (block.get("title"), block.get("context")) if isinstance(each, str) and each)
    parts = _text_parts(content, name)
    return [{**part, "text": f"{title}\n{part['text']}"} for part in parts] if title else parts


def _text_parts(content: Any, name: str) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, Sequence):
        raise bad_request(f"{name} has no text: give a string or a list of text blocks", name)
    parts = []
    for block in blocks:
        text = block.get("text") if isinstance(block, Mapping) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise bad_request(f"{name} holds what is no text block: give {{'type': 'text', 'text': '...'}}", name)
        parts.append({"type": "text", "text": text, **_mark(block.get("cache_control"), f"{name}.cache_control")})
    return parts


def _mark(given: Any, name: str) -> dict[str, Any]:
    """Return a `cache_control` as a field of a text part; no field for None. Raises APIError (400)."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or given.get("type") != "ephemeral" or given.get("ttl") not in _TTLS:
        raise bad_request(
            f"{name} is {given!r}: give {{'type': 'ephemeral'}}, with a ttl of '5m' or '1h' if you like", name
        )
    return {"cache_control": given}


def _tool(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"{name}.type={tool['type']!r} is not supported: this server has no tools of its own", name)
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type", "auto")
    choices: dict[Any, Any] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if kind not in choices:
        raise bad_request(f"tool_choice.type={kind!r} is unknown: use {', '.join(choices)}", "tool_choice")
    return {"tool_choice": choices[kind], "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def _template_kwargs(body: MessagesRequest) -> dict[str, Any] | None:
    """Return the variables of the template; `thinking` is `enable_thinking` to the templates that know it."""
    kind = (body.thinking or {}).get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise bad_request(f"thinking.type={kind!r} is unknown: use 'enabled' or 'disabled'", "thinking")
    own = {} if kind is None else {"enable_thinking": kind != "disabled"}
    return own | (body.chat_template_kwargs or {}) or None
