"""What the server's process measures of requests: times as their callers see them, and how they ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from types import TracebackType

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric as Family

from vllm_blend.engine.errors import DeadlineError, EngineDeadError, QueueFullError
from vllm_blend.entrypoints.openai.metrics.histogram import SECONDS, TOKENS, Histogram
from vllm_blend.entrypoints.openai.metrics.recent import Recent
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
FINISH_REASONS = ("stop", "length", "abort", "error")
FAILURES = ("bad_input", "queue_full", "engine_down", "deadline", "failed")
REFUSALS = (400, 401, 404, 405, 408, 413, 414, 415, 429, 431, 500, 503)  # the statuses of requests that get no further


class Recorder:
    """Adds up the requests of a server. It is used by one thread, that of the event loop."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.histograms = {name: Histogram(f"vllm:{name}", text, SECONDS) for name, text in _HISTOGRAMS.items()}
        self.histograms |= {name: Histogram(f"vllm:{name}", text, TOKENS) for name, text in _SIZES.items()}
        self.finished = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.failed = Counter(dict.fromkeys(FAILURES, 0))
        self.refused = Counter(dict.fromkeys(REFUSALS, 0))
        self.recent = Recent()

    def request(self, params: SamplingParams, arrival_time: float) -> RequestRecord:
        """Return the record of a new request: a context in which it runs."""
        return RequestRecord(self, params, arrival_time)

    def count_refused(self, status: int) -> None:
        """Count a request that was answered by an error before it reached the engine."""
        self.refused[status] += 1

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


class RequestRecord:
    """A request while it runs. `on_output` takes its outputs in turn; what ends the context without a finished output
    is an error, or an abort if the caller has gone."""

    def __init__(self, recorder: Recorder, params: SamplingParams, arrival_time: float) -> None:
        self._recorder, self._arrival_time = recorder, arrival_time
        self._is_delta = params.output_kind is RequestOutputKind.DELTA
        self._num_tokens = [0] * params.n
        self._last_time: float | None = None
        self._ended: set[int] = set()  # completions
        self._is_finished = False

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_finished:
            return
        if error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self._recorder.finished["abort"] += len(self._num_tokens) - len(self._ended)
        else:
            self._recorder.failed[_reason(error)] += 1

    def on_output(self, output: RequestOutput) -> None:
        """Count what is new in an output."""
        metrics = output.metrics or RequestMetrics(self._arrival_time)
        num_new = self._count_tokens(output)
        for completion in output.outputs:
            if completion.finish_reason is not None and completion.index not in self._ended:
                self._ended.add(completion.index)
                self._recorder.finished[completion.finish_reason] += 1
        if sum(num_new):
            self._count_times(metrics, max(num_new), len(output.prompt_token_ids))
            self._recorder.recent.count_generated(sum(num_new))
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

    def _count_times(self, metrics: RequestMetrics, num_steps: int, num_prompt_tokens: int) -> None:
        """Count the times of new tokens, which took `num_steps` steps."""
        recorder = self._recorder
        if self._last_time is None:
            self._last_time = metrics.first_token_time or time.time()
            latency = self._last_time - metrics.arrival_time
            recorder.observe("time_to_first_token_seconds", latency)
            recorder.recent.count_first_token(latency, num_prompt_tokens)
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


def _reason(error: BaseException) -> str:
    kinds = {QueueFullError: "queue_full", EngineDeadError: "engine_down", DeadlineError: "deadline"}
    kinds |= {ValueError: "bad_input", TypeError: "bad_input"}
    return next((reason for kind, reason in kinds.items() if isinstance(error, kind)), "failed")
