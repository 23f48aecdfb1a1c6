"""Spans of requests: what they say, whose traces they belong to, and that a collector can read them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.entrypoints.openai.servers import TestServer
from vllm_blend.entrypoints import serve
from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.tracing import Tracing, traces_url

pytestmark = pytest.mark.cpu_only

PASSAGES = ["Beltane Works makes boats.\n\n", "Beltane Works was founded in Jorholm.\n\n"]
PROMPT = {"prefix": "", "chunks": PASSAGES, "suffix": "Question: What does Beltane Works make?"}
BODY = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True, "seed": 1}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def post(
    server: TestServer, tracing: Tracing, *calls: tuple[dict[str, Any], dict[str, str]], **options: Any
) -> list[httpx.Response]:
    """Send completion requests (body, headers) in turn to an application with tracing over the server's engine."""
    app = create_app(server.engine, ServerOptions(**options), tracing)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return [await client.post("/v1/completions", json=body, headers=headers) for body, headers in calls]

    try:
        return server.call(ask())
    finally:
        app.state.server.close()


def test_spans_say_what_requests_asked_for_and_got(server: TestServer) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "X-Request-Id": "mine"}
    calls: list[tuple[dict[str, Any], dict[str, str]]] = [
        (BODY, sampled),
        (BODY | {"stream": True, "n": 2}, {"traceparent": "not-a-trace"}),
        (BODY, {"traceparent": f"00-{TRACE}-{PARENT}-00"}),  # the caller does not want it sampled
        (BODY | {"prompt": ["a", "b"]}, {}),
    ]
    answers = post(server, Tracing(provider), *calls)
    assert [answer.status_code for answer in answers] == [200] * 4
    first, streamed, *two = exporter.get_finished_spans()
    assert len(two) == 2  # a span for each prompt

    assert (first.name, first.kind, first.status.status_code) == ("llm_request", SpanKind.SERVER, StatusCode.UNSET)
    assert first.parent is not None and first.context is not None
    assert f"{first.context.trace_id:032x}" == TRACE and f"{first.parent.span_id:016x}" == PARENT
    assert first.context.trace_state.get("a") == "b"
    assert streamed.parent is None and two[0].parent is None

    found: dict[str, Any] = dict(first.attributes or {})
    usage = answers[0].json()["usage"]
    times = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    details = usage["prompt_tokens_details"]
    reuse = {f"vllm_blend.usage.{name}": value for name, value in details.items() if name != "tiers"}
    assert sum(details[name] for name in ("cached_tokens", "stored_tokens", "recomputed_tokens")) > 0
    assert found == {
        "gen_ai.request.id": "cmpl-mine",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.response.model": server.engine.config.model.model,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.num_sequences": 1,
        **reuse,
    }
    names = ("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e")
    assert times.keys() == {f"gen_ai.latency.{name}" for name in names}
    in_queue, first_token, *_, whole = (times[f"gen_ai.latency.{name}"] for name in names)
    assert 0 <= in_queue <= first_token <= whole
    assert first.start_time is not None and first.end_time is not None
    assert (first.end_time - first.start_time) / 1e9 >= whole - 0.001

    deltas: dict[str, Any] = dict(streamed.attributes or {})
    assert (deltas["gen_ai.usage.completion_tokens"], deltas["gen_ai.usage.num_sequences"]) == (10, 2)
    assert deltas["vllm_blend.usage.reused_tokens"] > 0


def test_spans_of_requests_without_an_answer(server: TestServer) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    [answer] = post(server, Tracing(provider), (BODY, {}), request_timeout=1e-9)
    assert answer.status_code == 504
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR and span.attributes is not None
    assert span.attributes["error.type"] == "DeadlineError"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert "gen_ai.usage.prompt_tokens" not in span.attributes


def test_a_collector_gets_the_spans_before_the_server_ends(server: TestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with collector() as (url, received):
        tracing = Tracing.to_endpoint(url)
        [answer] = post(server, tracing, (BODY, {"X-Request-Id": "sent"}))
        assert answer.status_code == 200
        tracing.close()
    [(path, body)] = received
    assert path == "/v1/traces"
    request: Any = ExportTraceServiceRequest()
    request.ParseFromString(body)
    [resource] = request.resource_spans
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"] == "vllm-blend"
    [span] = resource.scope_spans[0].spans
    attributes = {each.key: each.value for each in span.attributes}
    assert attributes["gen_ai.request.id"].string_value == "cmpl-sent"
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 5
    assert attributes["gen_ai.latency.time_to_first_token"].double_value > 0


def test_endpoints() -> None:
    assert traces_url("http://a:4318") == traces_url("http://a:4318/") == "http://a:4318/v1/traces"
    assert traces_url("https://a/b?c=d") == "https://a/b?c=d"


@pytest.mark.parametrize(
    "missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"]
)
def test_what_is_not_installed_is_named_before_the_model_is_looked_for(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert serve.main(["/missing/model", "--otlp-traces-endpoint", "http://localhost:4318"]) == 2
    error = capsys.readouterr().err
    assert f"otlp_traces_endpoint needs {missing}: run pip install 'vllm-blend[otel]'" in error


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Run a collector, and yield its address and the paths and bodies that it is sent."""
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/x-protobuf"
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", received
        finally:
            listener.shutdown()
            thread.join()
