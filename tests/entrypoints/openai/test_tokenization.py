"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest

from tests.entrypoints.openai.servers import TestServer
from vllm_blend import LLM

pytestmark = pytest.mark.cpu_only


def test_text_and_back(server: TestServer, offline: LLM) -> None:
    found = server.post("/tokenize", json={"prompt": "Tulmaris Works", "return_token_strs": True}).json()
    tokenizer = offline.get_tokenizer()
    assert found["tokens"] == tokenizer.encode("Tulmaris Works")
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 1024
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    bare = server.post("/tokenize", json={"prompt": "Tulmaris Works", "add_special_tokens": False}).json()
    assert bare["tokens"] == found["tokens"][1:]
    assert server.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": "Tulmaris Works"}


def test_chat(server: TestServer) -> None:
    """The ids are those that a chat has."""
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    found = server.post("/tokenize", json={"messages": messages}).json()["tokens"]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    assert server.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == found


def test_tools_are_looked_into(server: TestServer) -> None:
    body = {"messages": [{"role": "user", "content": "b"}]}
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    without = server.post("/tokenize", json=body).json()["tokens"]
    assert server.post("/tokenize", json=body | {"tools": []}).json()["tokens"] == without
    assert server.post("/tokenize", json=body | {"tools": [tool]}).status_code == 200
    for wrong, message in (
        ({}, "tools[0].type=None is not supported"),
        ({"type": "function", "function": {"name": 3}}, "tools[0].function.name=3 is not a name"),
    ):
        answer = server.post("/tokenize", json=body | {"tools": [wrong]})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"]
