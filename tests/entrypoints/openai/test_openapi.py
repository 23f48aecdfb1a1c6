"""/openapi.json says what the endpoints take and send."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import jsonschema_rs
import pytest

from tests.entrypoints.openai.servers import TestServer
from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.protocol.messages import MessagesErrorResponse
from vllm_blend.entrypoints.openai.protocol.responses import ResponsesResponse

USER = {"role": "user", "content": "a"}
STREAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
WITHOUT_BODY = ("/health", "/ready", "/ping")
PARAMETERS = {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS}


def describe(**options: Any) -> dict[str, Any]:
    return create_app(MagicMock(), ServerOptions(**options)).openapi()


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    return describe()


def test_every_answer_is_described(description: dict[str, Any]) -> None:
    for path, operations in description["paths"].items():
        for operation in operations.values():
            content = operation["responses"]["200"].get("content", {})
            if path in WITHOUT_BODY:
                assert not content
            elif path not in ("/metrics", "/status"):
                assert "$ref" in content["application/json"]["schema"], path
            assert ("text/event-stream" in content) == (path in STREAMING)
            assert "422" not in operation["responses"]


def test_errors_are_those_that_are_sent(description: dict[str, Any]) -> None:
    """Every reference leads somewhere, and Anthropic's endpoints have a shape of their own."""
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        name = "MessagesErrorResponse" if path.startswith("/v1/messages") else "ErrorResponse"
        for operation in operations.values():
            content = operation["responses"]["400"]["content"]
            assert content == {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    assert schemas["ErrorResponse"]["required"] == ["error"]
    assert schemas["MessagesErrorResponse"]["required"] == ["type", "error"]
    assert schemas["MessagesErrorResponse"]["properties"]["error"] == {"$ref": "#/components/schemas/ErrorInfo"}
    assert "ErrorInfo" in schemas and "HTTPValidationError" not in schemas


def test_keys_are_described_where_the_server_has_some(description: dict[str, Any]) -> None:
    assert "security" not in description and "securitySchemes" not in description["components"]
    with_keys = describe(api_key=["secret"])
    assert {*with_keys["components"]["securitySchemes"]} == {"bearer", "header"}
    assert with_keys["security"] == [{"bearer": []}, {"header": []}]
    open_paths = {
        path for path, each in with_keys["paths"].items() if any(o.get("security") == [] for o in each.values())
    }
    assert open_paths == {"/health", "/ready", "/ping", "/version", "/metrics", "/status"}


def test_messages_are_described(description: dict[str, Any]) -> None:
    chat = description["components"]["schemas"]["ChatCompletionRequest"]["properties"]["messages"]
    assert chat["minItems"] == 1
    assert [kind["required"] for kind in chat["items"]["anyOf"]] == [["role", "content"], ["role", "tool_calls"]]


def test_alternatives_are_described(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    for name, fields in (("ChunkRequest", ["token_ids", "text"]), ("TokenizeRequest", ["prompt", "messages"])):
        assert [kind["required"] for kind in schemas[name]["anyOf"]] == [[field] for field in fields]


@pytest.mark.cpu_only
def test_what_may_be_left_out_may_be_none(server: TestServer, description: dict[str, Any]) -> None:
    """The description says so, and the server takes it."""
    result = {"type": "tool_result", "tool_use_id": "1"}
    results = [[result], [result | {"content": None}], [result | {"content": "a"}]]
    documents = [
        {"text": "a", "score": None, "title": None},
        {"data": "a", "score": None, "id": None},
        {"text": "a", "score": 1.5},
    ]
    function = {"name": "f", "description": None, "parameters": None}
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/messages/count_tokens", "MessagesRequest", {"messages": [{"role": "user", "content": content}]})
        for content in results
    ]
    bodies += [("/tokenize", "TokenizeRequest", {"messages": [USER], "documents": [each]}) for each in documents]
    bodies.append(
        ("/tokenize", "TokenizeRequest", {"messages": [USER], "tools": [{"type": "function", "function": function}]})
    )
    for path, name, body in bodies:
        if path.startswith("/v1/messages"):
            body |= {"model": "demo", "max_tokens": 1}
        schema = {"$ref": f"#/components/schemas/{name}", "components": description["components"]}
        assert jsonschema_rs.is_valid(schema, body), body
        answer = server.post(path, json=body)
        assert answer.status_code == 200, (body, answer.text)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "fields, kind, status",
    [
        ({"ignore_eos": True}, "message", "incomplete"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "function_call", "completed"),
        ({"text": {"format": {"type": "json_schema", "schema": {"enum": [1]}}}}, "message", "completed"),
    ],
)
def test_responses_fit(server: TestServer, fields: dict[str, Any], kind: str, status: str) -> None:
    body = {"input": [USER], "max_output_tokens": 40, "reasoning": {"effort": "low"}, **fields}
    answer = server.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    response = ResponsesResponse.model_validate_json(answer.content, strict=True, extra="forbid")
    assert [item.type for item in response.output] == [kind] and response.status == status


@pytest.mark.cpu_only
def test_errors_of_messages_fit(server: TestServer) -> None:
    answer = server.post("/v1/messages", json={"messages": [USER]})
    assert answer.status_code == 400
    MessagesErrorResponse.model_validate_json(answer.content, strict=True, extra="forbid")
