"""The description of the API in /openapi.json: what FastAPI derives from the endpoints, and what it cannot know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_blend.entrypoints.openai.protocol.common import ErrorResponse
from vllm_blend.entrypoints.openai.protocol.messages import MessagesErrorResponse

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The request is wrong",
        401: "The API key is missing or unknown",
        404: "There is no such model or endpoint",
        408: "The body did not come in time",
        413: "The body is too large",
        415: "The body is not JSON",
        429: "Too many requests wait",
        503: "The engine is down, or the server is shutting down",
        504: "The request took too long",
    }.items()
}
_OWN_ERRORS = ("HTTPValidationError", "ValidationError")  # FastAPI's: bodies that do not fit are answered by 400


def describe_fully(
    describe: Callable[[], dict[str, Any]], has_keys: bool, open_paths: frozenset[str]
) -> dict[str, Any]:
    """Return the description that `describe` makes, with errors as they are sent, and with the API key if the server
    has keys. `open_paths` are those that need none."""
    schema = describe()
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in _OWN_ERRORS:
        schemas.pop(name, None)
    # Nothing refers to it before: endpoints share their errors, and Anthropic's clients get one more key.
    messages_error = MessagesErrorResponse.model_json_schema(ref_template="#/components/schemas/{model}")
    messages_error.pop("$defs", None)
    schemas["MessagesErrorResponse"] = messages_error
    for path, operations in schema["paths"].items():
        error = "MessagesErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for status in map(str, ERRORS):
                content = {"schema": {"$ref": f"#/components/schemas/{error}"}}
                operation["responses"][status]["content"] = {"application/json": content}
            if has_keys and path in open_paths:
                operation["security"] = []
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        schema["security"] = [{"bearer": []}, {"header": []}]
    return schema
