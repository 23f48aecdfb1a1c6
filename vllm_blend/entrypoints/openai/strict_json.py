"""Request bodies: JSON, read strictly, so that what is wrong with one is said before it is looked at."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from vllm_blend.entrypoints.openai.errors import APIError, bad_request


class StrictRequest(Request):
    """A request whose body is read by `parse_json`. `state.arrival_time` is when all of it was there: what a client
    takes to send it is no time of the server's."""

    async def json(self) -> Any:
        body = await self.body()
        self.state.arrival_time = time.time()
        return parse_json(body)


class StrictRoute(APIRoute):
    """A route that reads bodies by `parse_json`, also those that come without a Content-Type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            if self.body_field is not None:
                _check_content_type(request.headers.get("content-type"))
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text. Raises APIError (400) that says what is wrong with it, and where."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise bad_request(
            f"the body is not valid UTF-8: {error.reason} at byte {error.start}", code="invalid_encoding"
        ) from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise bad_request("the body is not valid JSON: it is nested too deeply", code="invalid_json") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if "\\ud" in text or "\\uD" in text:
        _check_surrogates(value)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number: use a finite one, or null")


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise bad_request(
            "the body holds half of a surrogate pair, which is not a character: remove it", code="invalid_encoding"
        ) from error


def _check_content_type(given: str | None) -> None:
    kind = (given or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise APIError(415, f"Content-Type is {kind!r}: send JSON, with Content-Type: application/json")
