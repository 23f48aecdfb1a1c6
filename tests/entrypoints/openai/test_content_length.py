"""Lengths of bodies that clients announce."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from vllm_blend.entrypoints.openai.middleware import RequestContext
from vllm_blend.entrypoints.openai.tenancy import Tenants

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(("length", "status"), [(b"9" * 5000, 413), (b"0" * 5000 + b"4", 200), (b"101", 413)])
def test_a_length_of_any_number_of_digits_is_answered(length: bytes, status: int) -> None:
    app = RequestContext(
        PlainTextResponse("fine"), Tenants(), max_body_size=100, logs_access=False, on_refused=lambda _: None
    )
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"text", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", length)]}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status


@pytest.mark.parametrize(("num_sent", "num_read"), [(5, 5), (100, 8)])
def test_a_body_that_is_announced_as_too_large_is_read_before_the_answer(num_sent: int, num_read: int) -> None:
    """A client that is still sending does not read the answer. What it sends is not read without end."""
    left = num_sent
    sent: list[Message] = []

    async def receive() -> Message:
        nonlocal left
        assert not sent, "the answer came first"
        left -= 1
        return {"type": "http.request", "body": bytes(100), "more_body": left > 0}

    async def send(message: Message) -> None:
        sent.append(message)

    app = RequestContext(PlainTextResponse("fine"), Tenants(), 100, False, lambda _: None)
    headers = [(b"content-length", str(100 * num_sent).encode())]
    asyncio.run(app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send))
    assert sent[0]["status"] == 413 and num_sent - left == num_read


@pytest.mark.parametrize(("path", "refused"), [("/v1/completions", [405]), ("/metrics", [])])
def test_errors_of_requests_for_completions_count_as_refused(path: str, refused: list[int]) -> None:
    counted: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Message) -> None:
        pass

    app = RequestContext(PlainTextResponse("no", 405), Tenants(), 100, False, counted.append)
    asyncio.run(app({"type": "http", "method": "PUT", "path": path, "headers": []}, receive, send))
    assert counted == refused
