"""Streams on the wire: vLLM's rules for their chunks, and what happens when a client leaves."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.servers import TestServer
from tests.waiting import DEADLINE, wait_until

pytestmark = pytest.mark.cpu_only

PROMPT = "Tulmaris Works makes lenses.\n\nQuestion: What does Tulmaris Works make?\nAnswer:"
LONG: Any = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
ENDLESS = LONG | {"n": 128}  # a minute's work or more


def events(response: httpx.Response) -> list[Any]:
    """Return the chunks of a stream, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, end = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_choice_ends_once(server: TestServer, path: str) -> None:
    is_chat = path != "/v1/completions"
    asked: Any = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": [PROMPT, "Question:"]}
    body = asked | {"n": 2, "max_tokens": 5, "seed": 1, "stream": True}
    chunks = events(server.post(path, json=body))
    whole = server.post(path, json=body | {"stream": False}).json()
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    for choice in whole["choices"]:
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [choice["finish_reason"]]
        texts = [piece["delta"].get("content") or "" if is_chat else piece["text"] for piece in pieces]
        assert "".join(texts) == (choice["message"]["content"] if is_chat else choice["text"])
    assert len(whole["choices"]) == (2 if is_chat else 4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_events_are_lines_to_every_client(server: TestServer, path: str, body: dict[str, Any]) -> None:
    """openai/openai-python#1230: clients that split text as `str.splitlines` does cut an event at U+2028."""
    text = "a\x85b\u2028c\u2029d"
    asked = body | {"structured_outputs": {"choice": [text]}, "max_tokens": 60, "temperature": 0, "stream": True}
    whole = server.post(path, json=asked | {"stream": False}).json()["choices"][0]
    lines = [line.removeprefix("data: ") for line in server.post(path, json=asked).text.splitlines() if line][:-1]
    choices = [json.loads(line)["choices"][0] for line in lines]
    if path == "/v1/completions":
        assert "".join(choice["text"] for choice in choices) == whole["text"] == f"a{text}"
    else:
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_streams(server: TestServer, path: str) -> None:
    prompt: Any = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(
        server.post(
            path, json=prompt | {"max_tokens": 4, "ignore_eos": True, "stream": True, "stream_options": options}
        )
    )
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4


def test_token_ids(server: TestServer) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    [choice] = server.post("/v1/completions", json=body).json()["choices"]
    assert choice["prompt_token_ids"] == [5, 6, 7] and len(choice["token_ids"]) == 3
    chunks = events(server.post("/v1/completions", json=body | {"stream": True}))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    first, *others = [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks]
    assert first == [5, 6, 7] and not any(others)


def test_request_ids(server: TestServer) -> None:
    answer = server.post("/v1/completions", json=LONG | {"max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    answer = server.post("/v1/completions", json=LONG | {"max_tokens": 1}, headers={"X-Request-Id": "no id"})
    assert answer.headers["x-request-id"] != "no id" and answer.json()["id"].startswith("cmpl-")


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: TestServer, streams: bool) -> None:
    before = server.metrics()
    body = json.dumps(ENDLESS | {"stream": streams}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(server.address) as connection:
        connection.sendall(head + body)
        if streams:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] > 0)
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0)
    after = server.metrics()
    assert after["vllm:kv_cache_usage_perc"] == 0
    assert after["vllm:generation_tokens"] - before["vllm:generation_tokens"] < 128 * 900


def test_a_half_closed_connection_is_answered_or_aborted(server: TestServer) -> None:
    body = json.dumps(LONG).encode()
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(DEADLINE)
        while connection.recv(4096):
            pass
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0)


def test_a_slow_reader_keeps_no_one_waiting(server: TestServer) -> None:
    """One that does not read at all: its request ends all the same, and so does another one."""
    body = json.dumps(LONG | {"max_tokens": 200, "stream": True, "logprobs": 20}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert server.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 0)
        received = b""
        connection.settimeout(DEADLINE)
        while b"[DONE]" not in received[-100:]:
            piece = connection.recv(1 << 16)
            assert piece
            received += piece
    assert received.count(b'"finish_reason":"length"') == 1
