"""A request behind an ASGI application: its answer, its errors, and a client that leaves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from vllm_blend.ray.forwarding import ForwardedRequest, answer

SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "headers": [(b"a", b"1"), (b"X-Request-Id", b"theirs")],
    "state": {"request_id": "ours"},
    "app": object(),
}


def test_a_request_takes_its_id_along_and_nothing_of_the_process() -> None:
    request = ForwardedRequest.from_scope(SCOPE, b"body")
    assert request.scope["headers"] == [(b"a", b"1"), (b"x-request-id", b"ours")]
    assert "app" not in request.scope and "state" not in request.scope
    without = ForwardedRequest.from_scope({**SCOPE, "state": {}}, b"")
    assert without.scope["headers"] == [(b"a", b"1")]
    assert b"body" not in repr(request).encode()


def test_messages_come_as_they_are_sent() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": message["body"], "more_body": number < 2})

    async def run() -> list[Message]:
        return [message async for message in answer(echo, ForwardedRequest.from_scope(SCOPE, b"body"))]

    messages = asyncio.run(run())
    assert [message.get("body") for message in messages] == [None, b"body", b"body", b"body"]


def test_an_error_comes_behind_what_was_sent() -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("broken")

    async def run() -> None:
        seen = 0
        with pytest.raises(RuntimeError, match="broken"):
            async for _ in answer(fail, ForwardedRequest.from_scope(SCOPE, b"")):
                seen += 1
        assert seen == 1

    asyncio.run(run())


def test_closing_disconnects_and_cancels() -> None:
    ends: list[str] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await receive()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def run() -> None:
        async with aclosing(answer(endless, ForwardedRequest.from_scope(SCOPE, b""))) as messages:
            async for _ in messages:
                break
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert ends == ["cancelled"]
