"""Server-sent events: a stream of JSON chunks that ends with [DONE]."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from vllm_blend.entrypoints.openai.errors import as_api_error
from vllm_blend.entrypoints.openai.generation import until_disconnected

# What endpoints that stream say of it in the API's description.
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream=true, server-sent events",
        "content": {"text/event-stream": {}},
    }
}
DONE = "data: [DONE]\n\n"
# JSON has them in strings as they are, and lines of an event stream may hold them, but many clients (all that use
# `splitlines`, such as httpx's `iter_lines`) end a line there.
_SEPARATORS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must pass chunks on at once


def data_event(text: str) -> str:
    return f"data: {text}\n\n"


def _error_event(error: Exception) -> str:
    return data_event(json.dumps(as_api_error(error).body)) + DONE


async def event_stream(
    request: Request,
    events: AsyncGenerator[str, None],
    error_event: Callable[[Exception], str] = _error_event,
) -> StreamingResponse:
    """Return the response that streams `events`. The first one is awaited before, so that what is wrong with a request
    has its own HTTP status; a later error is the last event. The generator is closed when the client leaves."""
    first = await until_disconnected(request, _next(events))
    body = _stream(first, events, error_event)
    return StreamingResponse(body, media_type="text/event-stream", headers=_HEADERS)


async def _next(events: AsyncGenerator[str, None]) -> str:
    return await anext(events)


async def _stream(
    first: str, events: AsyncGenerator[str, None], error_event: Callable[[Exception], str]
) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        yield _on_lines(first)
        try:
            async for event in events:
                yield _on_lines(event)
        except Exception as error:
            yield error_event(error)


def _on_lines(event: str) -> str:
    """Return an event whose lines are those that every client takes for such."""
    return event if event.isascii() else event.translate(_SEPARATORS)


def dump(chunk: dict[str, Any]) -> str:
    """Return a chunk as JSON on one line."""
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
