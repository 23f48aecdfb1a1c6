"""The metrics of a real server, after requests over real sockets."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.entrypoints.openai.metrics.test_server_metrics import dict_of, read
from tests.entrypoints.openai.servers import TestServer
from tests.waiting import wait_until
from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.options import ServerOptions

pytestmark = pytest.mark.cpu_only

PROMPT = {"prompt": "Question: Where was Tulmaris Works founded?", "max_tokens": 7, "ignore_eos": True}
PASSAGES = ["Tulmaris Works makes lenses.\n\n", "Tulmaris Works was founded in Jorholm.\n\n"]


def counts(server: TestServer) -> dict[str, float]:
    """Return what the server has counted: numbers of values for histograms."""
    samples = read(httpx.get(f"{server.url}/metrics").content)
    found = {
        name: values[0][1] for name, values in samples.items() if name.endswith(("_count", "_sum", "_tokens_total"))
    }
    found |= dict_of(samples, "vllm:request_success_total", "finished_reason")
    return found | dict_of(samples, "vllm_blend:requests_failed_total", "reason")


def test_requests_are_counted(server: TestServer) -> None:
    tokens = "vllm:generation_tokens_total"  # the engine's, which the server reads again after a moment
    wait_until(lambda: counts(server)[tokens] == server.metrics()["vllm:generation_tokens"])
    before = counts(server)
    usages: list[Any] = [
        server.post("/v1/completions", json=PROMPT | extra).json()["usage"] for extra in ({}, {"n": 2})
    ]
    streamed = server.post("/v1/completions", json=PROMPT | {"stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    wait_until(lambda: counts(server)[tokens] == before[tokens] + 4 * 7)
    assert counts(server)["length"] == before["length"] + 4
    after = {name: value - before[name] for name, value in counts(server).items()}
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert after[f"vllm:{name}_seconds_count"] == 3, name
    assert after["vllm:inter_token_latency_seconds_count"] == 3 * 6
    num_generated = sum(usage["completion_tokens"] for usage in usages) + 7
    assert after["vllm:request_generation_tokens_sum"] == after["vllm:generation_tokens_total"] == num_generated
    assert after["vllm:request_prompt_tokens_sum"] == 3 * usages[0]["prompt_tokens"]
    whole, parts = after["vllm:e2e_request_latency_seconds_sum"], ("queue", "prefill", "decode")
    assert whole >= sum(after[f"vllm:request_{part}_time_seconds_sum"] for part in parts) - 1e-4
    assert (after["stop"], after["abort"], after["failed"]) == (0, 0, 0)


def test_clients_that_leave_and_bad_input_are_counted(server: TestServer) -> None:
    before = counts(server)
    assert server.post("/v1/completions", json=PROMPT | {"prompt": [10**6]}).status_code == 400
    body = json.dumps(PROMPT | {"max_tokens": 900, "n": 128, "stream": True}).encode()  # a minute's work or more
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    wait_until(lambda: counts(server)["abort"] == before["abort"] + 128)
    assert counts(server)["failed"] == before["failed"]


def test_refusals_are_counted_apart(server: TestServer) -> None:
    """They never reach the engine; /health does not count."""

    def refused() -> tuple[dict[str, float], dict[str, int]]:
        samples = read(httpx.get(f"{server.url}/metrics").content)
        requests = httpx.get(f"{server.url}/status").json()["requests"]
        return dict_of(samples, "vllm_blend:requests_refused_total", "status"), requests

    (before, requests), bad = refused(), PROMPT | {"temperature": "hot"}
    assert server.post("/v1/completions", json=bad).status_code == 400
    assert server.post("/v1/completions", json=PROMPT | {"model": "other"}).status_code == 404
    assert server.post("/v1/completions", json=PROMPT | {"prompt": "a" * (1 << 20)}).status_code == 413
    after, now = refused()
    assert {status for status in after if after[status] == before[status] + 1} == {"400", "404", "413"}
    assert (now["refused"], now["failed"]) == (requests["refused"] + 3, requests["failed"])


def test_the_status_counts_tokens_as_the_usage_does(server: TestServer) -> None:
    def tokens() -> dict[str, int]:
        found: dict[str, int] = httpx.get(f"{server.url}/status").json()["tokens"]
        return found

    before = tokens()
    total = dict.fromkeys(before, 0)
    chunks = [f"{passage} It was in 1847." for passage in PASSAGES]
    for prompt in ({"prefix": "", "chunks": chunks, "suffix": "Question: What?"}, "Question: What? Where?"):
        for _ in range(2):
            usage = server.post("/v1/completions", json=PROMPT | {"prompt": prompt}).json()["usage"]
            details = usage["prompt_tokens_details"]
            total["prompt"] += usage["prompt_tokens"]
            total["generated"] += usage["completion_tokens"]
            for name in ("cached", "reused", "stored", "recomputed"):
                total[name] += details[f"{name}_tokens"]
    assert {name: value - before[name] for name, value in tokens().items()} == total
    assert min(total.values()) > 0


def test_the_status_page_follows_what_is_served(server: TestServer) -> None:
    prompt = {"prefix": "", "chunks": PASSAGES, "suffix": "Question: What?"}
    assert server.post("/v1/completions", json=PROMPT | {"prompt": prompt}).status_code == 200
    status = httpx.get(f"{server.url}/status").json()
    assert status["engine_up"] and status["model"] == "demo"
    assert status["first_token_seconds"]["count"] > 0 and status["first_token_seconds"]["p99"] > 0
    assert "memory" in [tier["name"] for tier in status["tiers"]]
    assert "Tulmaris Works makes lenses." in [passage["text"] for passage in status["passages"]]
    assert "<title>vllm-blend</title>" in httpx.get(server.url).text


def test_a_server_with_keys_shows_no_passages(server: TestServer) -> None:
    app = create_app(server.engine, ServerOptions(api_key=["a-key"]))

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            prompt = {"prefix": "", "chunks": PASSAGES, "suffix": "Question: What?"}
            body = {"prompt": prompt, "max_tokens": 1}
            served = await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer a-key"})
            return [served, *[await client.get(path) for path in ("/", "/metrics", "/status", "/v1/models")]]

    served, *answers, models = server.call(ask())
    app.state.server.close()
    assert served.status_code == 200
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert (answers[-1].json()["passages"], models.status_code) == ([], 401)
