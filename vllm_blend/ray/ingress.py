"""The ingress: reads a request's body, sees which passages it holds, and forwards it to the replica that has them.

Ray Serve's own HTTP proxy chooses a replica before it has read the body, by what the headers say. So the proxy's
replicas are these thin ones, and they choose among the engines.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.middleware import RequestContext
from vllm_blend.entrypoints.openai.passages import PassageFinder
from vllm_blend.entrypoints.openai.strict_json import INLINE_BYTES
from vllm_blend.entrypoints.openai.tenancy import Tenants
from vllm_blend.ray.forwarding import ForwardedRequest, RoutingKey
from vllm_blend.ray.passages import passage_tokens

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 5.0  # in which a replica has to take a request for /health
_HEALTH = ("/health", "/ready", "/ping")
# What a replica would answer for itself alone.
_OF_ONE_REPLICA = ("/metrics", "/status", "/v1/chunks")
_LOST = "the replica that was answering has ended: try again"


class Forwarder:
    """An ASGI application that has every request answered by a replica behind `handle`.

    A request whose replica dies before its answer has begun is sent again, `retries` times at most. `is_only` says that
    there is never more than one replica.
    """

    def __init__(self, get_handle: Callable[[], DeploymentHandle], retries: int, is_only: bool) -> None:
        self._get_handle, self._retries, self._is_only = get_handle, retries, is_only
        self._handle: DeploymentHandle | None = None
        self._finder = PassageFinder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        self._check_path(scope["path"])
        body = await _read(receive)
        key = await self._key(scope, body)
        await self._forward(ForwardedRequest.from_scope(scope, body), key, send)

    def _check_path(self, path: str) -> None:
        """Raise APIError for what would be the affair of one replica among several."""
        for prefix in () if self._is_only else _OF_ONE_REPLICA:
            if path == prefix or path.startswith(f"{prefix}/"):
                raise APIError(
                    501,
                    f"{prefix} is not served by several replicas, as each has its own: send passages with the requests "
                    "that use them, and read Ray Serve's metrics",
                    code="not_supported_with_replicas",
                )

    async def _key(self, scope: Scope, body: bytes) -> RoutingKey:
        arguments = (scope["path"], Headers(scope=scope), body, self._finder)
        if len(body) <= INLINE_BYTES:
            return RoutingKey(passage_tokens(*arguments))
        return RoutingKey(await asyncio.to_thread(passage_tokens, *arguments))

    async def _forward(self, request: ForwardedRequest, key: RoutingKey, send: Send) -> None:
        path = request.scope["path"]
        for attempt in range(self._retries + 1):
            relay = _Relay(send, key)
            key.has_begun = False
            try:
                if path in _HEALTH:
                    async with asyncio.timeout(HEALTH_SECONDS):
                        await self._relay(request, key, relay)
                else:
                    await self._relay(request, key, relay)
                return
            except (RayActorError, RayTaskError) as error:
                cause = error.as_instanceof_cause() if isinstance(error, RayTaskError) else error
                if not isinstance(cause, RayActorError):
                    raise
                logger.warning("the replica of a request for %s has ended (attempt %d): %s", path, attempt + 1, cause)
                if relay.started:
                    await relay.end(path)
                    return
            except TimeoutError as error:
                raise APIError(503, "no replica is ready", code="engine_unavailable") from error
        raise APIError(
            503,
            f"{self._retries + 1} replicas have ended while they had this request: try again",
            code="engine_unavailable",
            headers={"Retry-After": "5"},
        )

    async def _relay(self, request: ForwardedRequest, key: RoutingKey, relay: _Relay) -> None:
        if self._handle is None:
            self._handle = self._get_handle().options(stream=True, method_name="forward")
        stream = self._handle.remote(request, key)
        try:
            async for message in stream:
                await relay.pass_on(message)
        except asyncio.CancelledError:  # the client has left
            stream.cancel()
            raise


class _Relay:
    """Passes an answer on to the client, and knows how far it has come."""

    def __init__(self, send: Send, key: RoutingKey) -> None:
        self._send, self._key = send, key
        self.started = self._is_stream = self._has_ended = False

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._is_stream = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._key.has_begun = True
            self._has_ended = not message.get("more_body", False)
        await self._send(message)

    async def end(self, path: str) -> None:
        """End an answer whose rest is lost: a stream by an error as its last event. Raises RuntimeError for any other
        answer, which ends the connection."""
        if self._has_ended:
            return
        if not self._is_stream:
            raise RuntimeError(_LOST)
        await self._send({"type": "http.response.body", "body": _last_event(path).encode(), "more_body": False})


def _last_event(path: str) -> str:
    """Return the event that tells of a lost replica, as the endpoint writes errors."""
    body: dict[str, Any] = APIError(503, _LOST, code="engine_unavailable").body
    if path.startswith("/v1/messages"):
        return f"event: error\ndata: {json.dumps({'type': 'error', **body})}\n\n"
    if path.startswith("/v1/responses"):
        error = body["error"]
        event = {"type": "error", "code": error["code"], "message": error["message"], "param": None}
        return f"event: error\ndata: {json.dumps(event)}\n\n"
    return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n"


def make_ingress_app(
    get_handle: Callable[[], DeploymentHandle], tenants: Tenants, max_body_size: int, retries: int, is_only: bool
) -> ASGIApp:
    """Return the ingress's application. Its keys, its limit on bodies, its request ids and its errors are those of the
    server: what a `Forwarder` raises before an answer has begun becomes an answer. A request without one of the keys is
    refused before its body is read; the replica looks at the key again, to know the tenant."""
    app = RequestContext(
        Forwarder(get_handle, retries, is_only),
        tenants=tenants,
        max_body_size=max_body_size,
        logs_access=False,
        on_refused=lambda _: None,
    )

    async def without_request_id(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":  # Ray Serve's proxy adds the same one
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
                message = {**message, "headers": kept}
            await send(message)

        prefix = scope.get("root_path", "")  # Ray Serve's route_prefix, with which a path begins
        if prefix and scope["type"] == "http":
            scope = {**scope, "path": scope["path"].removeprefix(prefix) or "/", "raw_path": None, "root_path": ""}
        await app(scope, receive, send_without)

    return without_request_id


async def _read(receive: Receive) -> bytes:
    """Return the body of a request. Raises CancelledError if the client leaves before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _live(receive: Receive, send: Send) -> None:
    """Take part in the lifespan of the process that serves an application; there is nothing to do."""
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
