"""Types of fields that the endpoints check themselves, with what the API's description says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

MAX_TOOLS = 1024  # of one request: all are written into its prompt


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def either(first: str, second: str, not_beside_first: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a model's schema says in addition if just one of two fields is to be given, and some others only with
    the second."""
    pairs = ((first, (second, *not_beside_first)), (second, (first,)))
    return {
        "anyOf": [{"required": [own], "properties": {own: _GIVEN} | dict.fromkeys(null, _NULL)} for own, null in pairs]
    }


def _one_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def _list(item: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, **others}


_GIVEN: dict[str, Any] = {"not": {"type": "null"}}
_TEXT = {"type": "string"}
_NAME = {"type": "string", "minLength": 1}
_NULL = {"type": "null"}
_JSON_TEXT = {"type": "string", "contentMediaType": "application/json", "examples": ['{"city": "Jorholm"}']}
_ANY_OBJECT = {"type": "object"}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return _one_of(schema, _NULL)


def _content(*kinds: str) -> dict[str, Any]:
    """Return a text, or a list of text parts, which may have any of these types."""
    return _one_of(_TEXT, _list(_object({"type": {"enum": list(kinds)}, "text": _TEXT})))


_ARGUMENTS = _one_of(_JSON_TEXT, _ANY_OBJECT, _NULL)
_CALL = _object({"type": {"const": "function"}, "function": _object({"name": _NAME}, arguments=_ARGUMENTS)})
_CHAT_MESSAGE = _one_of(
    _object({"role": _NAME, "content": _content("text")}),
    _object({"role": {"const": "assistant"}, "tool_calls": _list(_CALL, minItems=1)}, content=_NULL),
)
_SCORE = _or_null({"type": "number"})
_DOCUMENT = _one_of(
    _NAME,
    _object({"text": _NAME}, title=_or_null(_TEXT), score=_SCORE),
    _object({"data": _one_of(_NAME, _object({"text": _NAME}))}, score=_SCORE),
    _object({"id": {"type": "string", "pattern": "^chunk-"}}),
)
_ABOUT_FUNCTION = {"description": _or_null(_TEXT), "parameters": _or_null(_ANY_OBJECT)}
_TOOL = _object({"type": {"const": "function"}, "function": _object({"name": _NAME}, **_ABOUT_FUNCTION)})
_INPUT_ITEM = _one_of(
    _object({"role": _NAME, "content": _content("input_text", "output_text")}, type={"const": "message"}),
    _object({"type": {"const": "function_call"}, "call_id": _NAME, "name": _NAME}, arguments=_ARGUMENTS),
    _object({"type": {"const": "function_call_output"}, "call_id": _NAME, "output": _TEXT}),
)
_RESPONSES_TOOL = _object({"type": {"const": "function"}, "name": _NAME}, **_ABOUT_FUNCTION)
_SOURCE = _object({"type": {"const": "text"}, "data": _TEXT}, media_type={"const": "text/plain"})
_TEXT_BLOCK = _object({"type": {"const": "text"}, "text": _TEXT})
_BLOCK = _one_of(
    _TEXT_BLOCK,
    _object({"type": {"const": "document"}, "source": _SOURCE}, title=_TEXT),
    _object(
        {"type": {"const": "search_result"}, "content": _list(_object({"type": {"const": "text"}, "text": _TEXT}))}
    ),
    _object({"type": {"const": "tool_use"}, "id": _NAME, "name": _NAME, "input": _ANY_OBJECT}),
    _object({"type": {"const": "tool_result"}, "tool_use_id": _NAME}, content=_or_null(_content("text"))),
)

ChatMessages = Annotated[list[dict[str, Any]], Field(fail_fast=True), WithJsonSchema(_list(_CHAT_MESSAGE, minItems=1))]
Documents = Annotated[list[Any], Field(fail_fast=True), WithJsonSchema(_list(_DOCUMENT))]
Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS), WithJsonSchema(_list(_TOOL))]
InputItems = Annotated[list[dict[str, Any]], Field(fail_fast=True), WithJsonSchema(_list(_INPUT_ITEM, minItems=1))]
ResponsesTools = Annotated[
    list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS), WithJsonSchema(_list(_RESPONSES_TOOL))
]
Blocks = Annotated[list[dict[str, Any]], Field(fail_fast=True), WithJsonSchema(_list(_BLOCK, minItems=1))]
