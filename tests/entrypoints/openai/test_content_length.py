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
