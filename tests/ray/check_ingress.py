"""The ingress over a stand-in for Ray's handles: what clients hear when replicas die, and what is forwarded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from starlette.testclient import TestClient
from starlette.types import Message

from vllm_blend.entrypoints.openai.tenancy import Tenants
from vllm_blend.ray import ingress
from vllm_blend.ray.forwarding import ForwardedRequest, RoutingKey
from vllm_blend.ray.ingress import make_ingress_app

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]
Step = Message | Exception | float


class Stream:
    """What a handle returns: yields messages, sleeps for numbers and raises exceptions."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps, self.is_cancelled = steps, False

    async def __aiter__(self) -> AsyncIterator[Message]:
        for step in self._steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A handle whose n-th call takes the n-th list of steps."""

    def __init__(self, *calls: list[Step]) -> None:
        self._calls, self.seen = list(calls), list[tuple[ForwardedRequest, RoutingKey]]()
        self.streams: list[Stream] = []

    def options(self, **options: Any) -> Handle:
        assert options == {"stream": True, "method_name": "forward"}
        return self

    def remote(self, request: ForwardedRequest, key: RoutingKey) -> Stream:
        self.seen.append((request, key))
        self.streams.append(Stream(self._calls.pop(0)))
        return self.streams[-1]


def start(headers: list[tuple[bytes, bytes]] = JSON) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def body(text: str, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def client_of(handle: Handle, is_only: bool = False, max_body_size: int = 1000) -> TestClient:
    return TestClient(make_ingress_app(lambda: handle, Tenants(), max_body_size, retries=1, is_only=is_only))


CHUNKED = {"prompt": {"chunks": ["A passage of some length."], "suffix": "?"}}


def test_a_request_is_forwarded_with_its_passages() -> None:
    handle = Handle([start(), body("{}")])
    response = client_of(handle).post("/v1/completions?a=b", json=CHUNKED, headers={"X-Request-Id": "mine"})
    [(request, key)] = handle.seen
    assert response.json() == {} and "x-request-id" not in response.headers  # Ray Serve adds it
    assert request.scope["query_string"] == b"a=b" and json.loads(request.body) == CHUNKED
    assert (b"x-request-id", b"mine") in request.scope["headers"]
    assert len(key.passages) == 1 and key.has_begun


def test_a_replica_that_dies_before_the_answer_costs_nothing() -> None:
    handle = Handle([ActorDiedError()], [start(), body("{}")])
    assert client_of(handle).post("/v1/completions", json=CHUNKED).status_code == 200
    assert len(handle.seen) == 2


def test_when_all_tries_are_used_up_the_client_hears_503() -> None:
    handle = Handle([ActorDiedError()], [0.01, ActorDiedError()])
    response = client_of(handle).post("/v1/completions", json=CHUNKED)
    assert response.status_code == 503 and response.headers["retry-after"] == "5"
    assert response.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_that_is_cut_off_ends_with_an_error(path: str) -> None:
    handle = Handle([start(EVENTS), body("data: {}\n\n", True), ActorDiedError()])
    text = client_of(handle).post(path, json={}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert len(handle.seen) == 1
    if path in ("/v1/completions", "/v1/chat/completions"):
        assert events.pop() == "[DONE]"
    else:
        assert "event: error\n" in text and json.loads(events[-1])["type"] == "error"
    last = json.loads(events[-1])
    assert (last if path == "/v1/responses" else last["error"])["code"] == "engine_unavailable"


def test_another_answer_that_is_cut_off_breaks_the_connection() -> None:
    handle = Handle([start(), body("{", True), ActorDiedError()])
    with pytest.raises(RuntimeError, match="has ended"):
        client_of(handle).post("/v1/completions", json=CHUNKED)


def test_a_replica_that_dies_behind_the_end_is_no_error() -> None:
    handle = Handle([start(), body("{}"), ActorDiedError()])
    assert client_of(handle).post("/v1/completions", json=CHUNKED).json() == {}


def test_errors_of_a_replica_itself_are_errors_of_the_server() -> None:
    response = client_of(Handle([RuntimeError("a fault")])).post("/v1/completions", json=CHUNKED)
    assert response.status_code == 500 and response.json()["error"]["code"] == "internal_error"


def test_a_body_that_is_too_large_is_not_forwarded() -> None:
    handle = Handle()
    response = client_of(handle, max_body_size=10).post("/v1/completions", json=CHUNKED)
    assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("path", ["/metrics", "/status", "/v1/chunks", "/v1/chunks/chunk-1"])
def test_what_each_replica_has_for_itself_is_refused_where_there_are_several(path: str) -> None:
    response = client_of(Handle()).get(path)
    assert response.status_code == 501
    assert response.json()["error"]["code"] == "not_supported_with_replicas"
    assert client_of(Handle([start(), body("{}")]), is_only=True).get(path).status_code == 200


def test_health_is_503_while_no_replica_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress, "HEALTH_SECONDS", 0.05)
    handle = Handle([5.0])
    response = client_of(handle).get("/health")
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_unavailable"
    assert handle.streams[0].is_cancelled


def test_a_client_that_leaves_cancels_the_stream() -> None:
    handle = Handle([start(EVENTS), 5.0])
    app: Callable[..., Any] = make_ingress_app(lambda: handle, Tenants(), 1000, 1, False)
    request = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def run() -> None:
        begun = asyncio.Event()

        async def receive() -> Message:
            return request.pop()

        async def send(message: Message) -> None:
            begun.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        task = asyncio.create_task(app(scope, receive, send))
        await begun.wait()
        task.cancel()  # as Ray Serve does
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert handle.streams[0].is_cancelled


@pytest.mark.parametrize(("given", "status"), [("", 401), ("Bearer other", 401), ("Bearer mine", 200)])
def test_a_key_is_looked_at_before_the_body(given: str, status: int) -> None:
    handle = Handle([start(), body("{}")])
    app: Callable[..., Any] = make_ingress_app(lambda: handle, Tenants([(None, "mine")]), 1000, 1, False)
    reads: list[Message] = []
    sent: list[Message] = []

    async def receive() -> Message:
        reads.append({"type": "http.request", "body": b"{}", "more_body": False})
        return reads[-1]

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", given.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status
    assert len(reads) == len(handle.seen) == (status == 200)


def test_health_needs_no_key() -> None:
    handle = Handle([start(), body("{}")])
    app = make_ingress_app(lambda: handle, Tenants([(None, "mine")]), 1000, 1, False)
    assert TestClient(app).get("/health").status_code == 200


def test_a_route_prefix_is_no_part_of_the_path() -> None:
    handle = Handle([start(), body("{}")], [start(), body("{}")])
    app = make_ingress_app(lambda: handle, Tenants(), 1000, 1, True)
    client = TestClient(app, root_path="/here")
    for path in ("/here/v1/completions", "/here"):
        assert client.post(path, json=CHUNKED).status_code == 200
    assert [request.scope["path"] for request, _ in handle.seen] == ["/v1/completions", "/"]
    assert handle.seen[0][1].passages and not handle.seen[1][1].passages
