"""What is counted of a request's outputs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllm_blend.engine.errors import DeadlineError, EngineDeadError, QueueFullError, ShuttingDownError
from vllm_blend.entrypoints.openai.metrics.histogram import Histogram
from vllm_blend.entrypoints.openai.metrics.recent import MAX_SAMPLES, Recent
from vllm_blend.entrypoints.openai.metrics.recorder import Recorder
from vllm_blend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

PROMPT = [1, 2, 3]
# When the tokens of two completions come: (time, tokens of each so far). Arrival is at 100 s, the first step at 101 s.
STEPS = [(104.0, (1, 1)), (104.5, (2, 2)), (105.5, (3, 2)), (106.0, (4, 2))]


def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
    """Return the outputs of a request with two completions; the second one ends early."""
    found, before = [], (0, 0)
    for step, (now, counts) in enumerate(STEPS):
        is_last = step == len(STEPS) - 1
        metrics = RequestMetrics(100.0, 101.0, STEPS[0][0], now, 106.5 if is_last else None)
        reasons = ["stop" if is_last else None, "length" if step > 0 else None]
        completions = [
            CompletionOutput(index, "", [7] * count, finish_reason=reason)
            for index, (count, reason) in enumerate(zip(counts, reasons, strict=True))
        ]
        if kind is RequestOutputKind.DELTA:
            for completion, known in zip(completions, before, strict=True):
                completion.token_ids = completion.token_ids[known:]
            completions = [each for each in completions if each.token_ids]
        if kind is not RequestOutputKind.FINAL_ONLY or is_last:
            found.append(RequestOutput("r", None, PROMPT, None, completions, is_last, metrics))
        before = counts
    return found


def record(kind: RequestOutputKind, given: list[RequestOutput] | None = None) -> Recorder:
    recorder = Recorder("m")
    with recorder.request(SamplingParams(n=2, output_kind=kind), 100.0) as request:
        for output in outputs(kind) if given is None else given:
            request.on_output(output)
    return recorder


def totals(recorder: Recorder) -> dict[str, tuple[int, float]]:
    return {name: (sum(each.counts), each.total) for name, each in recorder.histograms.items()}


def test_every_kind_of_output_counts_the_same() -> None:
    expected = {
        "time_to_first_token_seconds": (1, 4.0),
        "inter_token_latency_seconds": (3, 2.0),
        "e2e_request_latency_seconds": (1, 6.5),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 3.0),
        "request_decode_time_seconds": (1, 2.0),
        "request_inference_time_seconds": (1, 5.0),
        "request_prompt_tokens": (1, 3.0),
        "request_generation_tokens": (1, 6.0),
    }
    for kind in RequestOutputKind:
        recorder = record(kind)
        assert totals(recorder) == expected, kind
        assert recorder.finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}
    exact = record(RequestOutputKind.DELTA).histograms["inter_token_latency_seconds"]
    [half, whole] = [bound for bound, count in zip(exact.bounds, exact.counts, strict=False) if count]
    assert (half, whole) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no"), "bad_input"),
        (QueueFullError("full", 1.0), "queue_full"),
        (EngineDeadError("dead"), "engine_down"),
        (ShuttingDownError("bye"), "engine_down"),
        (DeadlineError("late"), "deadline"),
        (RuntimeError("what"), "failed"),
    ],
)
def test_requests_without_an_answer_are_counted_by_why(error: Exception, reason: str) -> None:
    recorder = Recorder("m")
    with pytest.raises(type(error)), recorder.request(SamplingParams(), 0.0):
        raise error
    assert +recorder.failed == {reason: 1}
    assert not +recorder.finished


@pytest.mark.parametrize("error", [asyncio.CancelledError(), GeneratorExit(), None])
def test_callers_that_leave_abort(error: BaseException | None) -> None:
    recorder = Recorder("m")
    request = recorder.request(SamplingParams(n=2), 0.0)
    for output in outputs(RequestOutputKind.CUMULATIVE)[:2]:
        request.on_output(output)
    request.__exit__(None if error is None else type(error), error, None)
    assert recorder.finished == {"abort": 1, "length": 1, "stop": 0, "error": 0}
    assert not +recorder.failed


def test_a_request_that_the_engine_dropped_has_no_times() -> None:
    dropped = CompletionOutput(0, "", [], finish_reason="error")
    recorder = record(
        RequestOutputKind.CUMULATIVE, [RequestOutput("r", None, PROMPT, None, [dropped], True, RequestMetrics(100.0))]
    )
    assert recorder.finished["error"] == 1
    assert totals(recorder)["time_to_first_token_seconds"] == totals(recorder)["request_queue_time_seconds"] == (0, 0.0)


def test_bounds_belong_to_their_buckets() -> None:
    histogram = Histogram("seconds", "help", (1.0, 2.0))
    for value, count in ((1.0, 1), (1.5, 2), (9.0, 1), (-1.0, 1)):
        histogram.observe(value, count)
    samples = histogram.family([], []).samples
    assert [each.value for each in samples] == [2, 4, 5, 5, 13.0]


def test_recent_times_are_forgotten() -> None:
    now = 1000.0
    recent = Recent(clock=lambda: now)
    for latency in range(1, 101):
        recent.count_first_token(float(latency), 10, 4)
    recent.count_generated(50)
    assert recent.percentiles(recent.first_tokens) == {"p50": 50.0, "p99": 99.0, "count": 100}
    assert recent.rates() == {"prompt_tokens": 0, "generation_tokens": 0, "requests": 0}
    now = 1001.0
    recent.count_finished()
    now = 1002.0
    assert recent.rates() == {"prompt_tokens": 100.0, "generation_tokens": 5.0, "requests": 0.1}
    now = 1400.0
    nothing: dict[str, Any] = {"p50": None, "p99": None, "count": 0}
    assert recent.percentiles(recent.first_tokens) == nothing
    assert not any(recent.rates().values())


def test_reuse_and_errors_over_time() -> None:
    """Periods without anything are points without a share; those before the server started are no points."""
    now = 6000.0
    recent = Recent(clock=lambda: now)
    assert recent.reuse() == {"prompts": 0, "share": None}
    recent.count_first_token(1.0, 100, 0)
    now += 60
    recent.count_error("429", 3)
    now += 60
    for latency in (2.0, 4.0):
        recent.count_first_token(latency, 100, 75)
    recent.count_error("failed")
    assert recent.reuse() == {"prompts": 3, "share": 0.5}
    first, empty, last = recent.hour.points()["points"]
    assert (first["reused"], first["first_token_p50"], first["errors"]) == (0, 1.0, 0)
    assert (empty["reused"], empty["first_token_p99"], empty["errors"]) == (None, None, 3)
    assert (last["reused"], last["first_token_p50"], last["first_token_p99"], last["errors"]) == (0.75, 2.0, 4.0, 1)
    [day] = recent.day.points()["points"]
    assert (day["reused"], day["errors"]) == (0.5, 4)
    now += 300
    assert recent.reuse() == {"prompts": 0, "share": None}
    assert recent.errors() == {"429": 3, "failed": 1}
    now += 3600
    assert len(recent.hour.points()["points"]) == recent.hour.count
    assert not recent.errors() and not any(point["errors"] for point in recent.hour.points()["points"])


def test_a_period_keeps_samples_of_all_its_latencies() -> None:
    recent = Recent(clock=lambda: 0.0)
    for number in range(20 * MAX_SAMPLES):
        recent.count_first_token(float(number), 1, 0)
    kept = recent.hour.period.first_tokens
    assert len(kept) == MAX_SAMPLES == len(set(kept))
    assert min(kept) < 10 * MAX_SAMPLES < max(kept)  # fails by chance once in 2 ** MAX_SAMPLES runs


def test_tenants_are_counted_apart() -> None:
    recorder = Recorder("m", shows_tenants=True)
    with recorder.request(SamplingParams(n=2, output_kind=RequestOutputKind.DELTA), 100.0, "alice") as request:
        assert recorder.tenants["alice"].running == 1
        for output in outputs(RequestOutputKind.DELTA):
            output.num_cached_tokens, output.num_found_tokens = 2, {"disk": 2}
            request.on_output(output)
    with pytest.raises(RuntimeError), recorder.request(SamplingParams(), 0.0, "bob"):
        raise RuntimeError("what")
    alice, bob = recorder.tenants["alice"], recorder.tenants["bob"]
    assert (alice.running, alice.finished, alice.prompt, alice.cached, alice.generated) == (0, 1, 3, 2, 6)
    assert (bob.running, bob.failed, bob.prompt) == (0, 1, 0)
    tokens = next(family for family in recorder.collect() if family.name == "vllm_blend:tenant_tokens")
    told = {(each.labels["tenant"], each.labels["kind"]): each.value for each in tokens.samples}
    assert told["alice", "cached"] == 2 and told["bob", "generated"] == 0
    assert "tenant" not in "".join(family.name for family in Recorder("m").collect())
