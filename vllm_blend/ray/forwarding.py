"""HTTP between the ingress and a replica: a request travels whole, its answer as the messages of ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")


@dataclass(frozen=True)
class ForwardedRequest:
    """An HTTP request with its body."""

    scope: dict[str, Any]
    body: bytes = field(repr=False)

    @classmethod
    def from_scope(cls, scope: Scope, body: bytes) -> ForwardedRequest:
        """Return the request of an ASGI scope, without what means something to the process alone. The request's id,
        which the ingress has chosen, goes along as a header."""
        kept: dict[str, Any] = {name: scope[name] for name in _SCOPE if name in scope}
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"x-request-id"]
        request_id = scope.get("state", {}).get("request_id", "")
        kept["headers"] = [*headers, (b"x-request-id", request_id.encode())] if request_id else headers
        return cls(kept, body)


@dataclass
class RoutingKey:
    """What the router knows of a request: the tokens of each of its passages by id, and whether its answer has begun,
    which the ingress notes for the router in the same process."""

    passages: dict[str, int] = field(default_factory=dict)
    has_begun: bool = False


async def answer(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
    """Yield the messages in which an application answers. Closing the generator disconnects the client.

    Raises what the application raises.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    has_left = asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    async def run() -> None:
        try:
            await app({**request.scope, "asgi": {"version": "3.0"}, "root_path": "", "state": {}}, receive, send)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        has_left.set()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
