"""What is wrong with a request is said with the right status, in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from tests.entrypoints.openai.servers import TestServer
from vllm_blend.entrypoints.openai.middleware import RequestContext
from vllm_blend.entrypoints.openai.tenancy import Tenants

pytestmark = pytest.mark.cpu_only

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


def prompt(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1} | fields).encode()


def called_with(arguments: Any, times: int = 1) -> bytes:
    """A conversation in which a function was called with these arguments."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}] * times
    return chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": calls}])


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], "max_tokens": 1} | fields).encode()


BAD: list[tuple[str, bytes, int, str, str | None]] = [
    (COMPLETIONS, b"{", 400, "not valid JSON", None),
    (COMPLETIONS, b"", 400, "the body is missing", None),
    (COMPLETIONS, b"[]", 400, "not a JSON object", None),
    (COMPLETIONS, b"[" * 100_000, 400, "nested too deeply", None),
    (COMPLETIONS, b'{"prompt": NaN}', 400, "NaN is no JSON number", None),
    (COMPLETIONS, b'{"prompt": "a", "temperature": -Infinity}', 400, "no JSON number", None),
    (COMPLETIONS, b'{"prompt": "a", "temperature": 1e400}', 400, "temperature", "temperature"),
    (COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "digits", None),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400, "not valid UTF-8", None),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair", None),
    (COMPLETIONS, b"{}", 400, "prompt is missing", "prompt"),
    (COMPLETIONS, prompt(prompt=5), 400, "prompt is 5", "prompt"),
    (COMPLETIONS, prompt(prompt=None), 400, "prompt is None", "prompt"),
    (
        COMPLETIONS,
        prompt(prompt={"chunks": "a"}),
        400,
        "prompt.chunks is 'a': it should be a valid list",
        "prompt.chunks",
    ),
    (COMPLETIONS, prompt(prompt=[]), 400, "prompt is an empty list", "prompt"),
    (CHAT, chat(chat_template_kwargs={"documents": ["a"]}), 400, "give documents", "chat_template_kwargs"),
    (COMPLETIONS, prompt(stop_token_ids=[-5]), 400, "an entry of stop_token_ids=-5 is out of range", "stop_token_ids"),
    (
        CHAT,
        chat(chat_template_kwargs={"messages": []}),
        400,
        "chat_template_kwargs has messages",
        "chat_template_kwargs",
    ),
    (COMPLETIONS, prompt(prompt=[[]]), 400, "cannot be empty", None),
    (COMPLETIONS, prompt(prompt=[-1]), 400, "out of vocabulary", "prompt"),
    (COMPLETIONS, prompt(prompt=["a"] * 10_000), 400, "10000 prompts", "prompt"),
    (COMPLETIONS, prompt(prompt="a " * 5000), 400, "context", None),
    (COMPLETIONS, prompt(prompt="a " * 400_000), 400, "more than twice as long", None),
    (COMPLETIONS, prompt(prompt="a" * (1 << 20)), 413, "larger than 1048576 bytes", None),
    (COMPLETIONS, prompt(prompt="a" * (10 << 20)), 413, "larger than 1048576 bytes", None),
    (COMPLETIONS, prompt(prompt={"chunks": ["a b"] * 10_000, "suffix": "q"}), 400, "context", None),
    (COMPLETIONS, prompt(prompt={"prefix": "a"}), 400, "prompt.chunks is missing", "prompt.chunks"),
    (COMPLETIONS, prompt(prompt={"chunks": [""], "suffix": "a"}), 400, "chunks[0] is empty", "chunks"),
    (COMPLETIONS, prompt(model="gpt-5"), 404, "the model 'gpt-5' does not exist", "model"),
    (COMPLETIONS, prompt(max_tokens="5"), 400, "max_tokens is '5'", "max_tokens"),
    (COMPLETIONS, prompt(max_tokens=5.5), 400, "max_tokens is 5.5", "max_tokens"),
    (COMPLETIONS, prompt(max_tokens=0), 400, "max_tokens=0", "max_tokens"),
    (COMPLETIONS, prompt(max_tokens=5000), 400, "maximum context length is 1024", "max_tokens"),
    (COMPLETIONS, prompt(request_id="a\nb"), 400, "it should match pattern", "request_id"),
    (COMPLETIONS, prompt(request_id="a" * 129), 400, "it should have at most 128 characters", "request_id"),
    (COMPLETIONS, prompt(n=0), 400, "n=0 is out of range: use an integer of at least 1", "n"),
    (COMPLETIONS, prompt(n=2, temperature=0), 400, "use n=1", "n"),
    (COMPLETIONS, prompt(logprobs=21), 400, "the engine allows 20", "logprobs"),
    (COMPLETIONS, prompt(stop=[1]), 400, "stop[0] is 1", "stop[0]"),
    (COMPLETIONS, prompt(stop=["a"] * 1025), 400, "at most 1024 items, not 1025", "stop"),
    (COMPLETIONS, prompt(bad_words=["a"] * 1025), 400, "at most 1024 items", "bad_words"),
    (COMPLETIONS, prompt(logit_bias={"x": 1}), 400, "a key of logit_bias='x'", "logit_bias"),
    (COMPLETIONS, prompt(logit_bias={"5": 10**400}), 400, "is out of range", "logit_bias"),
    (COMPLETIONS, prompt(top_k=2**63), 400, "top_k=9223372036854775808 is out of range", "top_k"),
    (COMPLETIONS, prompt(max_cache_tokens=2**64), 400, "has more than 64 bits", None),
    (COMPLETIONS, prompt(structured_outputs={"json": {"maximum": 10**400}}), 400, "has more than 64 bits", None),
    (COMPLETIONS, prompt(cache_salt=""), 400, "cache_salt is empty", "cache_salt"),
    (COMPLETIONS, prompt(best_of=2), 400, "best_of=2 is not supported", "best_of"),
    (COMPLETIONS, prompt(suffix="a"), 400, "suffix='a' is not supported", "suffix"),
    (COMPLETIONS, prompt(guided_regex="a"), 400, "structured_outputs={'regex'", "guided_regex"),
    (COMPLETIONS, prompt(max_token=5), 400, "did you mean 'max_tokens'?", None),
    (COMPLETIONS, prompt(temprature=1), 400, "did you mean 'temperature'?", None),
    (COMPLETIONS, prompt(**{f"own_{i}": 1 for i in range(129)}), 400, "there are 129 fields that are unknown", None),
    (COMPLETIONS, prompt(stream_options={"include_usage": True}), 400, "stream=true", "stream_options"),
    (COMPLETIONS, prompt(stream=True, n=0), 400, "n=0", "n"),
    (CHAT, chat(messages=[]), 400, "messages is an empty list", "messages"),
    (CHAT, chat(messages=[USER] * 1025), 400, "the conversation has 1025 messages", "messages"),
    (CHAT, chat(documents=["a"] * 1024), 400, "has 1025 messages, parts, tool calls and documents", "messages"),
    (CHAT, called_with("{}", 1024), 400, "has 1026 messages, parts, tool calls and documents", "messages"),
    (CHAT, chat(messages="a"), 400, "messages is 'a'", "messages"),
    (CHAT, chat(messages=[5]), 400, "messages[0] is 5", "messages[0]"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages[0] has no content", "messages"),
    (CHAT, called_with([]), 400, "['arguments'] is of type list: give an object, or its JSON", "messages"),
    (CHAT, chat(messages=[{"role": 5, "content": "a"}]), 400, "the role 5", "messages"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]),
        400,
        "takes text alone",
        "messages",
    ),
    (
        "/v1/messages",
        json.dumps(
            {"messages": [{"role": "user", "content": "a", f"own_{i}": 1} for i in range(129)], "max_tokens": 1}
        ).encode(),
        400,
        "there are more than 128 unknown fields",
        "messages[128]",
    ),
    (
        COMPLETIONS,
        prompt(n=512, allowed_token_ids=list(range(1000)), temperature=1.0),
        400,
        "allowed_token_ids and its like have 1000 entries for 512 completions",
        "allowed_token_ids",
    ),
    (
        COMPLETIONS,
        prompt(prompt=["a"] * 512, logit_bias={str(token): 1 for token in range(1000)}),
        400,
        "logit_bias and its like have 1000 entries for 512 completions",
        "logit_bias",
    ),
    (CHAT, chat(blend={"mode": "on"}), 400, "blend.mode='on' is unknown", "blend"),
    (CHAT, chat(blend={"selector": "nope"}), 400, "blend.selector: blend_selector='nope' is unknown", "blend"),
    (
        CHAT,
        chat(logprobs=True, top_logprobs=21),
        400,
        "top_logprobs=21 is too large: this server allows 20",
        "top_logprobs",
    ),
    (CHAT, chat(top_logprobs=2), 400, "needs logprobs=true", "top_logprobs"),
    (CHAT, chat(chat_template="a"), 400, "--trust-request-chat-template", "chat_template"),
    (CHAT, chat(chat_template_kwargs={"tokenize": True}), 400, "tokenize", "chat_template_kwargs"),
    (CHAT, chat(modalities=["audio"]), 400, "text only", "modalities"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools[0].function is missing", "tools"),
    (CHAT, chat(add_generation_prompt=True, continue_final_message=True), 400, "exclude each other", None),
    ("/tokenize", b"{}", 400, "give one of them", None),
    (
        "/tokenize",
        prompt(tools=[{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
        400,
        "tools belongs",
        None,
    ),
    ("/tokenize", prompt(documents=[{"id": None, "data": {"text": "a"}}]), 400, "documents belongs", None),
    ("/tokenize", prompt(prompt="a " * 400_000), 400, "more than 16 times max_model_len=1024 tokens", "prompt"),
    ("/detokenize", b'{"tokens": [-6]}', 400, "-6, outside the vocabulary", "tokens"),
    ("/v1/embeddings", b"{}", 404, "no pooling models", None),
    ("/v1/audio/transcriptions", b"{}", 404, "text only", None),
    ("/v1/load_lora_adapter", b"{}", 404, "merge the adapter", None),
    ("/v1/nothing", b"{}", 404, "no endpoint /v1/nothing", None),
    ("/v1/models", b"{}", 405, "does not take POST", None),
]


@pytest.mark.parametrize("path, body, status, says, param", BAD, ids=[f"{i}-{case[3]}" for i, case in enumerate(BAD)])
def test_bad_request(server: TestServer, path: str, body: bytes, status: int, says: str, param: str | None) -> None:
    response = server.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert says in error["message"] and error["param"] == param, error
    assert error.keys() == {"message", "type", "param", "code"} and response.headers["x-request-id"]


def test_a_body_without_a_length_is_limited_too(server: TestServer) -> None:
    response = server.post(COMPLETIONS, content=(b"a" * 65536 for _ in range(40)))
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


def test_a_body_whose_last_piece_is_too_much_is_answered_at_once() -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": b"12345678", "more_body": True},
        {"type": "http.request", "body": b"901", "more_body": False},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        assert messages, "nothing more comes before the client leaves"
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    async def read_all(_: Scope, receive: Receive, __: Send) -> None:
        while (await receive())["more_body"]:
            pass

    app = RequestContext(read_all, Tenants.from_options(None, None), 10, False, lambda _: None)
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 413


def test_other_formats_are_refused(server: TestServer) -> None:
    response = server.post(COMPLETIONS, content=prompt(), headers={"Content-Type": "text/plain"})
    assert response.status_code == 415 and "send JSON" in response.json()["error"]["message"]
    assert server.post(COMPLETIONS, content=prompt()).status_code == 200  # as curl users may leave it out
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = server.post(COMPLETIONS, content=gzip.compress(prompt()), headers=packed)
    assert response.status_code == 415 and "not compressed" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "own", "others"),
    [
        (CHAT, {"messages": [USER]}, {"system": "a", "input": "a", "prompt": "a", "max_output_tokens": 5}),
        (COMPLETIONS, {"prompt": "a"}, {"documents": ["a"], "messages": [USER], "tools": [{}]}),
        ("/v1/messages", {"messages": [USER]}, {"documents": ["a"], "stop": "a", "seed": 3, "logit_bias": {"1": 2.0}}),
        ("/v1/responses", {"input": "a"}, {"messages": [USER], "max_tokens": 5, "logit_bias": {"1": 2.0}, "n": 2}),
    ],
)
def test_what_another_endpoint_would_heed_is_not_ignored(
    server: TestServer, path: str, own: dict[str, Any], others: dict[str, Any]
) -> None:
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    for name, value in others.items():
        response = server.post(path, json=own | limit | {name: value})
        assert response.status_code == 400, name
        assert f"{name} is a field of /v1/" in response.json()["error"]["message"]
        assert f"{path} does not have it" in response.json()["error"]["message"]
    nothing = {name: type(value)() for name, value in others.items()} | {"n": 1}
    assert server.post(path, json=own | limit | nothing).status_code == 200


def test_unknown_fields_are_ignored(server: TestServer, caplog: pytest.LogCaptureFixture) -> None:
    response = server.post(COMPLETIONS, content=prompt(from_the_future=1, user="me", best_of=1, suffix=None))
    assert response.status_code == 200
    assert [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()] == [
        "the field 'from_the_future' of a request is unknown and ignored"
    ]


def test_the_server_is_well(server: TestServer) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/openapi.json"):
        assert httpx.get(server.url + path).status_code == 200
    assert server.post(COMPLETIONS, content=prompt()).status_code == 200
    assert server.metrics()["vllm:num_requests_running"] == 0
