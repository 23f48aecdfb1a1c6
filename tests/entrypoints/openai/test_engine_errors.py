"""What a client is told when the engine cannot answer: a deadline, a full queue, an error of the server's own."""

from __future__ import annotations

import http.client
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.servers import TestServer, serving
from tests.waiting import DEADLINE, wait_until
from vllm_blend.entrypoints.openai.generation import Generation
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.tenancy import ANYONE

pytestmark = pytest.mark.cpu_only

LONG: Any = {"prompt": "Where is it?", "max_tokens": 900, "ignore_eos": True}
CHAT: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 900}
# Path, body, and seconds: Anthropic's Messages cannot have the model go on after its end, so it must not get there.
LATE: tuple[tuple[str, Any, float], ...] = (
    ("/v1/completions", LONG, 0.05),
    ("/v1/chat/completions", CHAT | {"ignore_eos": True}, 0.05),
    ("/v1/messages", CHAT, 0.001),
)


@pytest.mark.parametrize(("path", "body", "seconds"), LATE)
def test_the_deadline(
    path: str, body: Any, seconds: float, server: TestServer, caplog: pytest.LogCaptureFixture
) -> None:
    """504 in every API's shape, with the request's id, also in the log. Pages are free; the connection serves on."""
    caplog.set_level(logging.INFO, "vllm_blend.access")
    with serving(server.engine, request_timeout=seconds) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE)
        connection.connect()
        connection.auto_open = 0
        for streams in (False, True):
            headers = {"Content-Type": "application/json", "X-Request-Id": "late"}
            connection.request("POST", path, json.dumps(body | {"stream": streams}), headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            # A stream that has begun by then ends with an event.
            assert answer.status == (200 if text.startswith(("data", "event")) else 504), text
            assert '"type": "timeout_error"' in text or '"type":"timeout_error"' in text
            assert answer.headers["x-request-id"] == "late"
        connection.close()
    assert f"request_id=late tenant=anyone client=127.0.0.1 method=POST path={path} status=504" in caplog.text
    assert "Traceback" not in caplog.text
    wait_until(lambda: server.metrics()["vllm:kv_cache_usage_perc"] == 0)


def test_the_time_before_a_request_is_tokenized_counts() -> None:
    server = SimpleNamespace(options=ServerOptions(request_timeout=5.0), engine=None, metrics=None, tracing=None)
    state = SimpleNamespace(arrival_time=100.0, tenant=ANYONE)
    request: Any = SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(server=server)), state=state, scope={"state": {}}
    )
    generation = Generation.from_call(request, "cmpl-1", [], None)
    assert (generation.arrival_time, generation.deadline) == (100.0, 105.0)


def test_a_full_queue(server: TestServer, caplog: pytest.LogCaptureFixture) -> None:
    """The engine takes 256 running completions and 64 waiting ones. What it cannot take is not tokenized either."""
    body = LONG | {"prompt": ["a"] * 4, "n": 100}
    with serving(server.engine) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE)
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1 and answer.headers["x-request-id"]
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert not [record for record in caplog.records if record.exc_info]


def test_too_many_wait_for_the_tokenizer(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = Event(), Event()

    def tokenize(*_: Any) -> list[int]:
        entered.set()
        leave.wait(DEADLINE)
        return [1, 2]

    monkeypatch.setattr("vllm_blend.entrypoints.openai.tokenization._tokenize", tokenize)
    with serving(server.engine, max_queued_requests=1) as url, ThreadPoolExecutor(1) as pool:
        first = pool.submit(httpx.post, f"{url}/tokenize", json={"prompt": "a"}, timeout=DEADLINE)
        assert entered.wait(DEADLINE)
        answer = httpx.post(f"{url}/tokenize", json={"prompt": "a"}, timeout=DEADLINE)
        leave.set()
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert "wait to be tokenized" in answer.json()["error"]["message"]
        assert first.result().json()["tokens"] == [1, 2]


def test_an_error_of_the_server(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of this program costs one answer, and neither its id nor the connection."""

    def fail(*_: Any) -> None:
        raise RuntimeError("of the test")

    with serving(server.engine) as url, httpx.Client(base_url=url, timeout=DEADLINE) as client:
        monkeypatch.setattr("vllm_blend.entrypoints.openai.completions.parse_completion_prompts", fail)
        answer = client.post("/v1/completions", json=LONG)
        assert answer.status_code == 500 and answer.headers["x-request-id"]
        assert answer.json()["error"]["message"] == "internal error: RuntimeError"
        assert client.get("/health").status_code == 200
