"""Traces: an OpenTelemetry span for each request of the engine, with vLLM's names of span and attributes.

The packages of OpenTelemetry (extra `otel`) are imported only when traces are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from vllm_blend.entrypoints.openai.passages import usage_details
from vllm_blend.outputs import RequestMetrics, RequestOutput
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

SERVICE_NAME = "vllm-blend"  # unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES says another
DEFAULT_PATH = "/v1/traces"
_CONTEXT_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an HTTP request that say which trace it belongs to."""
    return {name: headers[name] for name in _CONTEXT_HEADERS if name in headers}


class Tracing:
    """Makes spans with a `TracerProvider` of the SDK. Raises ImportError, saying what to install, without the SDK."""

    def __init__(self, provider: Any) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise _not_installed(error) from error
        self._api, self._provider = trace, provider
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("vllm_blend")

    @classmethod
    def to_endpoint(cls, endpoint: str) -> Tracing:
        """Return tracing that sends spans by OTLP over HTTP. Raises ValueError for what is no URL, and ImportError."""
        url = traces_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME as NAME
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise _not_installed(error) from error
        resource = Resource.create()
        if str(resource.attributes.get(NAME, "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({NAME: SERVICE_NAME}))
        provider = TracerProvider(resource=resource)
        # It sends in a thread of its own, and drops spans when too many wait.
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        return cls(provider)

    def request(
        self,
        request_id: str,
        model_name: str,
        arrival_time: float,
        headers: Mapping[str, str],
        params: SamplingParams,
    ) -> RequestSpan:
        """Return the span of a new request of the engine, a context in which it runs. `headers` name its trace."""
        attributes = {
            "gen_ai.request.id": request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.response.model": model_name,
        }
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            kind=self._api.SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=int(1e9 * arrival_time),
        )
        return RequestSpan(span, params, self._api.Status(self._api.StatusCode.ERROR))

    def close(self) -> None:
        """Send what has not been sent; if nothing answers, that takes as long as the exporter's timeout (10 s)."""
        self._provider.shutdown()


class RequestSpan:
    """A request's span while it runs. `on_output` takes its outputs in turn; it ends with the context."""

    def __init__(self, span: Any, params: SamplingParams, failed: Any) -> None:
        self._span, self._failed = span, failed
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._num_tokens = [0] * params.n
        self._reasons: list[str | None] = [None] * params.n
        self._output: RequestOutput | None = None

    def __enter__(self) -> RequestSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        has_left = error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit))
        reasons = [reason or ("abort" if has_left else "error") for reason in self._reasons]
        self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if self._output is not None:
            self._describe(self._output)
        if not has_left:
            self._span.set_attribute("error.type", type(error).__name__)
        if "error" in reasons:
            self._span.set_status(self._failed)
        self._span.end()

    def on_output(self, output: RequestOutput) -> None:
        """Note what is new in an output."""
        self._output = output
        for completion in output.outputs:
            count = len(completion.token_ids)
            self._num_tokens[completion.index] = count + self._is_delta * self._num_tokens[completion.index]
            self._reasons[completion.index] = completion.finish_reason or self._reasons[completion.index]

    def _describe(self, output: RequestOutput) -> None:
        metrics, usage = output.metrics or RequestMetrics(0.0), usage_details(output)
        first, last, ended = metrics.first_token_time, metrics.last_token_time, metrics.finished_time
        attributes = {
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(self._num_tokens),
            "gen_ai.usage.num_sequences": len(self._num_tokens),
            "gen_ai.latency.time_in_queue": metrics.time_in_queue,
            "gen_ai.latency.time_to_first_token": metrics.first_token_latency,
            "gen_ai.latency.time_in_model_prefill": metrics.time_in_prefill,
            "gen_ai.latency.time_in_model_decode": None if first is None or last is None else last - first,
            "gen_ai.latency.e2e": None if ended is None else ended - metrics.arrival_time,
            "vllm_blend.usage.cached_tokens": usage["cached_tokens"],
            "vllm_blend.usage.reused_tokens": usage["reused_tokens"],
            "vllm_blend.usage.recomputed_tokens": usage["recomputed_tokens"],
            "vllm_blend.usage.stored_tokens": usage["stored_tokens"],
        }
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are sent to: the endpoint, with OTLP's path if it has none. Raises ValueError."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"otlp_traces_endpoint={endpoint!r} is no HTTP URL: traces are sent by OTLP over HTTP, so give one such "
            f"as http://localhost:4318{DEFAULT_PATH}"
        )
    return urlunsplit(parts._replace(path=parts.path if parts.path.strip("/") else DEFAULT_PATH))


def _not_installed(error: ModuleNotFoundError) -> ImportError:
    return ImportError(f"otlp_traces_endpoint needs {error.name}: run pip install 'vllm-blend[otel]'")
