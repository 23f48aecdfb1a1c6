"""Request bodies: JSON, read strictly, so that what is wrong with one is said before it is looked at."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError

from vllm_blend.entrypoints.openai.errors import APIError, as_api_error, bad_request
from vllm_blend.entrypoints.openai.json_size import check_size
from vllm_blend.entrypoints.openai.middleware import address_of
from vllm_blend.entrypoints.openai.protocol.common import RequestModel
from vllm_blend.entrypoints.openai.server import IS_LONG, server_of

Model = TypeVar("Model", bound=RequestModel)
INLINE_BYTES = 1 << 16  # longer bodies are read in another thread: streams go on meanwhile

_UNPACED_BYTES = 1 << 12  # those of longer ones that come at once are read a few at a time


class StrictRequest(Request):
    """A request whose body is read by `parse_json`. `state.arrival_time` is when all of it was there: what a client
    takes to send it is no time of the server's."""

    def __init__(self, request: Request, model: type[RequestModel]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Return the value of a short body, and of a long one its model, which FastAPI does not validate again."""
        body = await self.body()
        self.state.arrival_time = time.time()
        if len(body) <= INLINE_BYTES:
            if len(body) > _UNPACED_BYTES:
                await server_of(self).pace.wait(address_of(self.scope))
            return parse_json(body)
        IS_LONG.set(True)
        return await server_of(self).in_converting_thread(read_model, body, self._model)


class StrictRoute(APIRoute):
    """A route that reads bodies by `parse_json`, also those that come without a Content-Type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            if self.body_field is None:
                return await handle(request)
            _check_format(request.headers)
            model: Any = self.body_field.field_info.annotation
            return await handle(StrictRequest(request, model))

        return handle_strictly


def read_model(body: bytes, model: type[Model]) -> Model:
    """Return a body as its model. Raises APIError that says what is wrong with it."""
    check_size(body)
    try:
        return model.model_validate(parse_json(body))
    except ValidationError as error:
        found = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        raise as_api_error(RequestValidationError(found)) from error


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text. Raises APIError (400) that says what is wrong with it, and where."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):  # it is a little too strict, and says less of what is wrong
        return _parse_slowly(body)


def _parse_slowly(body: bytes) -> Any:
    try:
        text = body.decode()
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


def _check_format(headers: Mapping[str, str]) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise APIError(415, f"Content-Encoding is {encoding!r}: send the body as it is, not compressed")
    kind = (headers.get("content-type") or "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise APIError(415, f"Content-Type is {kind!r}: send JSON, with Content-Type: application/json")
