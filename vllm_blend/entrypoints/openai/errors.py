"""Errors over HTTP, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from vllm_blend.engine.errors import DeadlineError, EngineDeadError, QueueFullError, ShuttingDownError

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ENGINE_ERRORS = (QueueFullError, DeadlineError, EngineDeadError)
_BRANCHES = frozenset(("str", "int", "float", "bool", "dict", "list", "none"))
_FIELD = re.compile(
    r"^(?:an entry of |a key of )?([a-z_]+)(?:\[[^\]]*\]|\.[a-z_]+)*(?:=|: | is | must | has | holds | names | needs )"
)


class APIError(HTTPException):
    """An error that a client sees, with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        """Return the error as clients read it."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> APIError:
    """Return what a client is told about an exception. One that is a fault of this program is logged."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, HTTPException):  # of Starlette: unknown paths and methods
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if (known := _engine_error(error)) is not None:
        return known
    if isinstance(error, (ValueError, TypeError)):
        return bad_request(str(error), _named_field(str(error)))
    logger.error("a request failed by an error of the server", exc_info=error)
    return APIError(500, f"internal error: {type(error).__name__}", code="internal_error")


def _engine_error(error: BaseException) -> APIError | None:
    """Return what a client is told about an error of the engine, None if it is another one."""
    if isinstance(error, QueueFullError):
        seconds = max(1, math.ceil(error.retry_after))
        return APIError(429, str(error), code="queue_full", headers={"Retry-After": str(seconds)})
    if isinstance(error, DeadlineError):
        return APIError(504, str(error), code="timeout")
    if isinstance(error, EngineDeadError):
        code = "shutting_down" if isinstance(error, ShuttingDownError) else "engine_unavailable"
        return APIError(503, str(error), code=code, headers={"Retry-After": "5"})
    return None


def _validation_error(error: RequestValidationError) -> APIError:
    """Return the error of a body that does not fit its model. Of a union's errors, the one deepest in the body tells
    most; several that are equally deep are alternatives."""
    found = error.errors()
    field = next((entry["loc"][1:2] for entry in found), ())
    same = [entry for entry in found if entry["loc"][1:2] == field]
    depth = max(len(entry["loc"]) for entry in same)
    deepest = [entry for entry in same if len(entry["loc"]) == depth]
    first = deepest[0]
    param = _path(first["loc"])
    if first["type"] == "value_error":  # of a validator of ours
        message = f"{param}: {first['msg']}".replace("Value error, ", "").removeprefix(": ")
        return bad_request(message, param or _named_field(message))
    if first["type"] == "missing":
        return bad_request(f"{param} is missing" if param else "the body is missing: send a JSON object", param or None)
    if not param:
        return bad_request("the body is not a JSON object: send {...}", code="invalid_type")
    asked = [entry for entry in deepest if entry["type"] != "missing"]  # of alternatives, what is there tells more
    wanted = dict.fromkeys(entry["msg"].partition(" should ")[2] or entry["msg"] for entry in asked)
    wanted = {text.replace(" after validation", ""): None for text in wanted}
    message = f"{param} is {_shown(first.get('input'))}: it should {' or '.join(wanted).replace(' or be ', ' or ')}"
    return bad_request(message, param, "invalid_type" if first["type"].endswith("_type") else None)


def _path(place: Sequence[int | str]) -> str:
    """Return where in a body an error is, as `a.b[0]`. Pydantic's names of a union's branches are left out."""
    path = ""
    for part in place[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _BRANCHES:
            path += f".{part}"
    return path.lstrip(".")


def _named_field(message: str) -> str | None:
    """Return the field that an error's text begins with."""
    found = _FIELD.match(message)
    return found.group(1) if found else None


def _shown(value: Any) -> str:
    short = reprlib.Repr()  # a long value is not written out to show its beginning
    short.maxlist = short.maxdict = 40
    short.maxstring = short.maxlong = short.maxother = 200
    text = short.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def error_response(error: BaseException, path: str) -> JSONResponse:
    """Return the answer to a request for `path` that failed. Anthropic's clients want one more key."""
    found = as_api_error(error)
    body = {"type": "error", **found.body} if path.startswith("/v1/messages") else found.body
    return JSONResponse(body, found.status_code, found.headers)


def install_error_handlers(app: FastAPI) -> None:
    """Have the errors of an application's endpoints answered in OpenAI's shape. What is no client's fault and none of
    the engine's passes on to `RequestContext`, which answers it as the last."""

    async def answer(request: Request, error: Exception) -> Response:
        return error_response(error, request.state.path)

    async def not_found(request: Request, error: Exception) -> Response:
        if isinstance(error, APIError):
            return error_response(error, request.state.path)
        message = f"there is no endpoint {request.state.path[:200]}: see /docs for those there are"
        return error_response(APIError(404, message), request.state.path)

    async def wrong_method(request: Request, error: Exception) -> Response:
        allowed = as_api_error(error).headers
        message = f"{request.state.path[:200]} does not take {request.method}: see /docs"
        return error_response(APIError(405, message, headers=allowed), request.state.path)

    for kind in (HTTPException, RequestValidationError, ValueError, TypeError, *_ENGINE_ERRORS):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(404, not_found)
    app.add_exception_handler(405, wrong_method)
