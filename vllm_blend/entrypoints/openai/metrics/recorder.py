"""What the server's process measures of requests: times as their callers see them, and how they ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from vllm_blend.engine.errors import DeadlineError, EngineDeadError, QueueFullError
from vllm_blend.entrypoints.openai.metrics.counts import TenantCounts, TokenCounts
from vllm_blend.entrypoints.openai.metrics.histogram import SECONDS, TOKENS, Histogram
from vllm_blend.entrypoints.openai.metrics.meanings import ENDS, FAILURES, REFUSALS
from vllm_blend.entrypoints.openai.metrics.recent import Recent
from vllm_blend.entrypoints.openai.tenancy import ANYONE, CURRENT
from vllm_blend.outputs import RequestMetrics, RequestOutput
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

_HISTOGRAMS = {
    "time_to_first_token_seconds": "Time from a request's arrival to its first token.",
    "inter_token_latency_seconds": "Time between two tokens of an answer.",
    "e2e_request_latency_seconds": "Time from a request's arrival to its end.",
    "request_queue_time_seconds": "Time that a request waits for its first step.",
    "request_prefill_time_seconds": "Time from a request's first step to its first token.",
    "request_decode_time_seconds": "Time from a request's first token to its last one.",
    "request_inference_time_seconds": "Time from a request's first step to its last token.",
}
_SIZES = {
    "request_prompt_tokens": "Tokens of a request's prompt.",
    "request_generation_tokens": "Tokens of all completions of a request.",
}
TENANT_RESULTS, TENANT_KINDS = ("finished", "failed", "refused"), ("prompt", "cached", "generated")
TENANT_RUNNING_HELP = "Prompts of a tenant that run or wait (--tenant-metrics)."
TENANT_PROMPTS_HELP = "A tenant's prompts that ended, and its requests that were refused (--tenant-metrics)."
TENANT_TOKENS_HELP = "Tokens of a tenant: of prompts, found of these, and generated (--tenant-metrics)."
FINISH_REASONS = ("stop", "length", "abort", "error")


class Recorder:
    """Adds up the requests of a server. It is used by one thread, that of the event loop. `shows_tenants`: tell
    Prometheus the names of tenants and what each has used."""

    def __init__(self, model_name: str, shows_tenants: bool = False) -> None:
        self.model_name, self.shows_tenants = model_name, shows_tenants
        self.histograms = {name: Histogram(f"vllm:{name}", text, SECONDS) for name, text in _HISTOGRAMS.items()}
        self.histograms |= {name: Histogram(f"vllm:{name}", text, TOKENS) for name, text in _SIZES.items()}
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.failed = Counter(dict.fromkeys(FAILURES, 0))
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))  # by the statuses of requests that get no further
        self.tokens = TokenCounts()
        self.tenants: dict[str, TenantCounts] = {}
        self.recent = Recent()

    def request(self, params: SamplingParams, arrival_time: float, tenant: str = ANYONE.name) -> RequestRecord:
        """Return the record of a new request: a context in which it runs."""
        return RequestRecord(self, params, arrival_time, self.tenant(tenant))

    def tenant(self, name: str) -> TenantCounts:
        """Return the counts of a tenant, which there are as many of as a server has keys."""
        return self.tenants.setdefault(name, TenantCounts())

    def count_refused(self, status: int) -> None:
        """Count a request, of the tenant whose task this is, that was answered by an error before it reached the
        engine."""
        self.refused[status] += 1
        self.tenant(CURRENT.get().name).refused += 1
        self.recent.count_error(str(status))

    def count_ended(self, reason: str, count: int = 1) -> None:
        """Count completions that have ended."""
        self.finished[reason] += count
        if reason in ENDS:
            self.recent.count_error(reason, count)

    def count_failed(self, reason: str) -> None:
        """Count a prompt that the engine gave no answer to."""
        self.failed[reason] += 1
        self.recent.count_error(reason)

    def observe(self, name: str, value: float | None, count: int = 1) -> None:
        """Count a value of a histogram; None for one that is not known."""
        if value is not None:
            self.histograms[name].observe(value, count)

    def collect(self) -> Iterator[Family]:
        """Yield the metrics for Prometheus's client."""
        for histogram in self.histograms.values():
            yield histogram.family(["model_name"], [self.model_name])
        finished = CounterMetricFamily(
            "vllm:request_success", "Completions that have ended.", labels=["model_name", "finished_reason"]
        )
        failed = CounterMetricFamily(
            "vllm_blend:requests_failed",
            "Prompts that were sent to the engine and ended without an answer.",
            labels=["model_name", "reason"],
        )
        refused = CounterMetricFamily(
            "vllm_blend:requests_refused",
            "Requests that were answered with an error before anything was sent to the engine.",
            labels=["model_name", "status"],
        )
        families = ((finished, self.finished), (failed, self.failed), (refused, self.refused))
        for family, counts in families:
            for reason, count in counts.items():
                family.add_metric([self.model_name, str(reason)], count)
            yield family
        if self.shows_tenants:
            yield from self._collect_tenants()

    def _collect_tenants(self) -> Iterator[Family]:
        labels = ["model_name", "tenant"]
        running = GaugeMetricFamily("vllm_blend:tenant_prompts_running", TENANT_RUNNING_HELP, labels=labels)
        prompts = CounterMetricFamily("vllm_blend:tenant_prompts", TENANT_PROMPTS_HELP, labels=[*labels, "result"])
        tokens = CounterMetricFamily("vllm_blend:tenant_tokens", TENANT_TOKENS_HELP, labels=[*labels, "kind"])
        for name, counts in self.tenants.items():
            running.add_metric([self.model_name, name], counts.running)
            for result in TENANT_RESULTS:
                prompts.add_metric([self.model_name, name, result], getattr(counts, result))
            for kind in TENANT_KINDS:
                tokens.add_metric([self.model_name, name, kind], getattr(counts, kind))
        yield from (running, prompts, tokens)


class RequestRecord:
    """A request while it runs. `on_output` takes its outputs in turn; what ends the context without a finished output
    is an error, or an abort if the caller has gone."""

    def __init__(self, recorder: Recorder, params: SamplingParams, arrival_time: float, tenant: TenantCounts) -> None:
        self._recorder, self._arrival_time, self._tenant = recorder, arrival_time, tenant
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._num_tokens = [0] * params.n
        self._last_time: float | None = None
        self._ended: set[int] = set()  # completions
        self._is_finished = False

    def __enter__(self) -> RequestRecord:
        self._tenant.running += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tenant.running -= 1
        if self._is_finished:
            return
        if error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self._recorder.count_ended("abort", len(self._num_tokens) - len(self._ended))
        else:
            self._recorder.count_failed(_reason(error))
            self._tenant.failed += 1

    def on_output(self, output: RequestOutput) -> None:
        """Count what is new in an output."""
        metrics = output.metrics or RequestMetrics(self._arrival_time)
        num_new = self._count_tokens(output)
        for completion in output.outputs:
            if completion.finish_reason is not None and completion.index not in self._ended:
                self._ended.add(completion.index)
                self._recorder.count_ended(completion.finish_reason)
        if sum(num_new):
            self._count_times(metrics, max(num_new), output)
            self._recorder.recent.count_generated(sum(num_new))
            for counts in (self._recorder.tokens, self._tenant):
                counts.generated += sum(num_new)
        if output.finished and not self._is_finished:
            self._is_finished = True
            self._finish(output, metrics)

    def _count_tokens(self, output: RequestOutput) -> list[int]:
        """Return how many tokens each completion in an output has that earlier outputs did not have."""
        num_new = [0]
        for completion in output.outputs:
            count = len(completion.token_ids)
            known = self._num_tokens[completion.index]
            num_new.append(count if self._is_delta else count - known)
            self._num_tokens[completion.index] = known + num_new[-1]
        return num_new

    def _count_times(self, metrics: RequestMetrics, num_steps: int, output: RequestOutput) -> None:
        """Count the times of the new tokens in an output, which took `num_steps` steps, and its prompt with the first
        of them."""
        recorder = self._recorder
        if self._last_time is None:
            self._last_time = metrics.first_token_time or time.time()
            latency = self._last_time - metrics.arrival_time
            recorder.observe("time_to_first_token_seconds", latency)
            num_cached = output.num_cached_tokens or 0
            recorder.recent.count_first_token(latency, len(output.prompt_token_ids), num_cached)
            for counts in (recorder.tokens, self._tenant):
                counts.count_prompt(output)
            num_steps -= 1
        now = metrics.last_token_time or time.time()
        if num_steps:
            latency = (now - self._last_time) / num_steps
            recorder.observe("inter_token_latency_seconds", latency, num_steps)
            recorder.recent.count_step(latency)
        self._last_time = now

    def _finish(self, output: RequestOutput, metrics: RequestMetrics) -> None:
        recorder = self._recorder
        first, last, started = metrics.first_token_time, metrics.last_token_time, metrics.first_scheduled_time
        recorder.observe("e2e_request_latency_seconds", (metrics.finished_time or time.time()) - metrics.arrival_time)
        recorder.observe("request_queue_time_seconds", metrics.time_in_queue)
        recorder.observe("request_prefill_time_seconds", metrics.time_in_prefill)
        recorder.observe("request_decode_time_seconds", None if first is None or last is None else last - first)
        recorder.observe("request_inference_time_seconds", None if last is None or started is None else last - started)
        recorder.observe("request_prompt_tokens", len(output.prompt_token_ids))
        recorder.observe("request_generation_tokens", sum(self._num_tokens))
        recorder.recent.count_finished()
        self._tenant.finished += 1


def _reason(error: BaseException) -> str:
    kinds = {QueueFullError: "queue_full", EngineDeadError: "engine_down", DeadlineError: "deadline"}
    kinds |= {ValueError: "bad_input", TypeError: "bad_input"}
    return next((reason for kind, reason in kinds.items() if isinstance(error, kind)), "failed")
