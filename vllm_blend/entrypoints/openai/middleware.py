"""What happens to every request before its endpoint: an id, a tenant, a limit on its size, and a line in the log."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_blend.entrypoints.openai.errors import APIError, error_response
from vllm_blend.entrypoints.openai.protocol.common import UNKNOWN_FIELDS
from vllm_blend.entrypoints.openai.tenancy import ANYONE, CURRENT, Tenants, Usage
from vllm_blend.entrypoints.openai.turns import Pace
from vllm_blend.log_lines import REQUEST_ID, log_request

# As in vLLM, these need no key, and nor does the status page. None tells what a tenant has sent.
OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/version", "/metrics", "/status", "/"))
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_LENGTH_DIGITS = 19  # of a 64-bit number
_DRAINED_BODIES = 8  # times the limit: what is read of a body that is too large, so that the client hears the answer


class RequestContext:
    """The layer around all endpoints. It puts `request_id` and `tenant` into the request's state, and answers errors
    that nothing else has answered: an error that reached uvicorn would cost the client its connection."""

    def __init__(
        self,
        app: ASGIApp,
        tenants: Tenants,
        max_body_size: int,
        logs_access: bool,
        on_refused: Callable[[int], None],
        root_path: str = "",
        body_timeout: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`on_refused` gets the status of every error that ends a request before the engine has its prompts. Many
        requests that come at once begin at a `pace`."""
        self.app, self.tenants, self.max_body_size, self.logs_access = app, tenants, max_body_size, logs_access
        self.on_refused, self.root_path = on_refused, root_path.rstrip("/")
        self.body_timeout, self.pace = body_timeout, pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.pace is not None:
            await self.pace.wait(address_of(scope))
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        if self.root_path:
            scope["root_path"] = self.root_path
        state["path"] = path = path_of(scope)
        REQUEST_ID.set(request_id)  # not reset: what follows in this task is about this request, errors included
        UNKNOWN_FIELDS.set(set())
        state["tenant"] = ANYONE
        begun, status, num_bytes = time.perf_counter(), 0, 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._answer(scope, headers, receive, send_with_id)
        finally:
            if status >= 400 and path not in OPEN_PATHS and "answer_id" not in state.get("log_fields", {}):
                self.on_refused(status)
            if self.logs_access:
                _log(scope, state, status, num_bytes, time.perf_counter() - begun)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        entered: Usage | None = None
        try:
            if scope["state"]["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                scope["state"]["tenant"] = tenant = self.tenants.authenticate(headers)
                CURRENT.set(tenant)
                if scope["method"] == "POST":  # all that costs the engine anything
                    tenant.usage.enter(tenant.limits)
                    entered = tenant.usage
            limited = await self._limit(headers, self._in_time(receive))
            await self._call(scope, limited, send)
        except APIError as error:
            await error_response(error, scope["state"]["path"])(scope, receive, send)
        finally:
            if entered is not None:
                entered.leave()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception as error:
            if begun:
                raise
            await error_response(error, scope["state"]["path"])(scope, receive, send)

    def _in_time(self, receive: Receive) -> Receive:
        """Return a `receive` that raises APIError if the body has not come in time. What comes after it, which is the
        client's leaving, may take any time."""
        if self.body_timeout is None:
            return receive
        seconds, ends, is_complete = self.body_timeout, asyncio.get_running_loop().time() + self.body_timeout, False

        async def receive_in_time() -> Message:
            nonlocal is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(ends):
                    message = await receive()
            except TimeoutError:
                raise APIError(
                    408,
                    f"the body took more than {seconds:g} s (--body-timeout): send it faster, or send less",
                    code="body_timeout",
                    headers={"Connection": "close"},
                ) from None
            is_complete = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        return receive_in_time

    async def _limit(self, headers: Headers, receive: Receive) -> Receive:
        """Return a `receive` that refuses a body beyond the limit. Raises APIError if its length says so already."""
        length = headers.get("content-length", "0")
        is_number = length.isascii() and length.isdigit()
        digits = length.lstrip("0")  # Python reads no number of thousands of digits
        if is_number and (len(digits) > _LENGTH_DIGITS or int(digits or 0) > self.max_body_size):
            await self._drain(receive)
            raise self._too_large()
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.max_body_size:
                    if message.get("more_body", False):  # behind the end nothing comes until the client leaves
                        await self._drain(receive)
                    raise self._too_large()
            return message

        return receive_limited

    async def _drain(self, receive: Receive) -> None:
        """Read on, without keeping it: a client that is still sending does not read the answer."""
        dropped = 0
        while dropped < _DRAINED_BODIES * self.max_body_size:
            message = await receive()
            dropped += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return

    def _too_large(self) -> APIError:
        return APIError(
            413,
            f"the body is larger than {self.max_body_size} bytes: send less, or raise --max-body-size",
            code="body_too_large",
        )


def address_of(scope: Scope) -> str:
    """Return the address of a request's client; all clients of a Unix socket have the same one."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def path_of(scope: Scope) -> str:
    """Return the path of a request as this server knows it: without `--root-path`, which some proxies keep."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and (path == prefix or path.startswith(f"{prefix}/")):
        return path[len(prefix) :] or "/"
    return path


def _log(scope: Scope, state: dict[str, Any], status: int, num_bytes: int, seconds: float) -> None:
    fields = {
        "request_id": state["request_id"],
        "tenant": state["tenant"].name,
        "client": address_of(scope) or None,
        "method": scope["method"],
        "path": scope["path"],
        "status": status or 499,  # the client left before there was an answer
        "bytes": num_bytes,
        "seconds": round(seconds, 6),
        **state.get("log_fields", {}),
    }
    log_request(fields)
