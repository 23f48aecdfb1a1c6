"""/metrics and /status, of engines that say what they are told to and of a real one."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tests.checkout import ROOT
from tests.entrypoints.openai.metrics.sources import Source, blending_llm
from tests.entrypoints.openai.metrics.test_recorder import outputs
from vllm_blend.engine.metrics import FOUND_IN, Counter, Gauge
from vllm_blend.entrypoints.openai.metrics import Recorder, ServerMetrics, endpoints, meanings
from vllm_blend.entrypoints.openai.metrics.hot_passages import HotPassages
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.tiers import DISK, MEMORY, REMOTE
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

# What users of vLLM have in their dashboards.
VLLM_NAMES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:num_preemptions_total",
    "vllm:cache_config_info",
)

Samples = dict[str, list[tuple[dict[str, str], float]]]


def read(text: bytes) -> Samples:
    """Return the samples of a text, by name. Prometheus's own parser reads it."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.type in ("counter", "gauge", "histogram"), family
        assert family.documentation
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
            if family.type == "counter":
                assert re.fullmatch(r".*(?<!_total)_total", sample.name), sample.name
    return samples


def get(metrics: ServerMetrics, path: str) -> httpx.Response:
    app = FastAPI()
    app.state.server = SimpleNamespace(metrics=metrics)
    app.include_router(endpoints.router)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_a_real_engine_has_what_dashboards_ask_for(tmp_path: Path) -> None:
    llm = blending_llm(tmp_path)
    metrics = ServerMetrics(Source(llm.get_metrics()), "m")
    with metrics.request(ParsedPrompt([1]), SamplingParams(n=2), 100.0) as request:
        for output in outputs(RequestOutputKind.CUMULATIVE):
            request.on_output(output)
    response = get(metrics, "/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = read(response.content)
    assert [name for name in VLLM_NAMES if name not in samples] == []
    for name, found in samples.items():
        if name.startswith("vllm"):
            assert all(labels["model_name"] == "m" for labels, _ in found), name
    assert dict_of(samples, "vllm:request_success_total", "finished_reason") == {
        "stop": 1,
        "length": 1,
        "abort": 0,
        "error": 0,
    }
    assert set(dict_of(samples, "vllm_blend:chunk_store_hits_total", "tier")) == {"memory", "disk"}
    assert dict_of(samples, "vllm_blend:chunk_store_hits_total", "tier")["memory"] > 0
    for name in ("read_bytes", "written_bytes", "load_seconds"):
        assert dict_of(samples, f"vllm_blend:chunk_store_{name}_total", "tier")["memory"] > 0, name
    [(cache, _)] = samples["vllm:cache_config_info"]
    assert cache["num_gpu_blocks"] == str(llm.llm_engine.blocks.num_blocks)
    assert set(dict_of(samples, "vllm_blend:chunk_store_errors_total", "operation")) == {"read", "write"}
    assert dict_of(samples, "vllm_blend:found_tokens_total", "source")["host"] > 0
    assert samples["vllm_blend:blend_reused_tokens_total"][0][1] > 0
    assert samples["vllm_blend:engine_up"] == [({"model_name": "m"}, 1.0)]
    assert "process_resident_memory_bytes" in samples
    asked = set(re.findall(r"\b(?:vllm:|vllm_blend:|process_)\w+", dashboard_expressions()))
    assert len(asked) > 25
    assert asked - samples.keys() == set()


def dict_of(samples: Samples, name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in samples[name]}


def dashboard_expressions() -> str:
    """Return what the dashboard asks Prometheus for."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert all(target["legendFormat"] for target in targets)
    return "\n".join(target["expr"] for target in targets) + json.dumps(dashboard["templating"])


def test_names_become_labels_and_totals() -> None:
    source = Source(
        [
            Counter("vllm:prompt_tokens", 5),
            Counter("vllm_blend:found_tokens_disk", 3),
            Gauge("vllm:num_preemptions", 2),
            Gauge("vllm_blend:chunk_store_disk_bytes_read", 7),
            Gauge("vllm_blend:something_new", 1.5),
            Counter("test:hooks_called", 4),
            Counter("vllm:request_success_stop", 9),
        ]
    )
    samples = read(get(ServerMetrics(source, "m"), "/metrics").content)
    model = {"model_name": "m"}
    assert samples["vllm:prompt_tokens_total"] == [(model, 5)]
    assert samples["vllm_blend:found_tokens_total"] == [({**model, "source": "disk"}, 3)]
    assert samples["vllm:num_preemptions_total"] == [(model, 2)]
    assert samples["vllm_blend:chunk_store_read_bytes_total"] == [({**model, "tier": "disk"}, 7)]
    assert samples["vllm_blend:something_new"] == [(model, 1.5)]
    assert samples["test:hooks_called_total"] == [(model, 4)]
    assert dict_of(samples, "vllm:request_success_total", "finished_reason")["stop"] == 0


def test_the_server_tells_of_a_dead_engine() -> None:
    metrics = ServerMetrics(Source(None), "m")
    samples = read(get(metrics, "/metrics").content)
    assert samples["vllm_blend:engine_up"] == [({"model_name": "m"}, 0.0)]
    assert "vllm:request_success_total" in samples
    assert samples["vllm:cache_config_info"][0][0]["num_gpu_blocks"] == "None"
    status = get(metrics, "/status").json()
    assert (status["engine_up"], status["requests"]["running"], status["tiers"]) == (False, None, [])
    assert status["engine_problem"] == "it is dead"


def test_the_time_saved_is_a_lower_bound() -> None:
    """What was found would have taken the fastest prefill some time; loading it took some of that back. An engine that
    has started again has forgotten how long it loaded."""

    def tell(speed: float, seconds: float) -> dict[str, Any]:
        source.metrics = [
            Gauge("vllm_blend:prefill_peak_tokens_per_second", speed),
            Gauge("vllm_blend:chunk_store_memory_load_seconds", seconds),
            Gauge("vllm_blend:chunk_store_disk_load_seconds", 2 * seconds),
        ]
        metrics._read_at = -1000.0
        reuse: dict[str, Any] = get(metrics, "/status").json()["reuse"]
        return reuse

    source = Source()
    metrics = ServerMetrics(source, "m")
    metrics.recorder.tokens.prompt, metrics.recorder.tokens.cached = 4000, 1000
    assert tell(0, 0)["saved_seconds"] is None
    assert (tell(50, 1)["saved_seconds"], tell(50, 1)["share"]) == (20 - 3, 0.25)
    assert tell(100, 0.5)["saved_seconds"] == 10 - 3 - 1.5
    source.metrics = None
    metrics._read_at = -1000.0
    reuse = get(metrics, "/status").json()["reuse"]
    assert (reuse["saved_seconds"], reuse["share"]) == (None, 0.25)


def test_all_kinds_are_explained() -> None:
    assert meanings.FOUND_IN.keys() == {*FOUND_IN}
    assert meanings.TIERS.keys() == {MEMORY, DISK, REMOTE}
    recorder = Recorder("m")
    for reason in meanings.ENDS:
        recorder.count_ended(reason)
    for reason in recorder.failed:
        recorder.count_failed(reason)
    for status in (*recorder.refused, 418):
        recorder.count_refused(status)
    num_kinds = len(meanings.ENDS) + len(recorder.failed) + len(recorder.refused)
    metrics = ServerMetrics(Source(), "m")
    metrics.recorder = recorder
    errors = get(metrics, "/status").json()["errors"]
    assert [(each["last_hour"], each["total"]) for each in errors] == [(1, 1)] * num_kinds
    assert all(each["meaning"].endswith(".") for each in errors)


def test_many_readers_ask_the_engine_once() -> None:
    source = Source()
    metrics = ServerMetrics(source, "m")

    async def ask() -> None:
        await asyncio.gather(*(metrics.text() for _ in range(5)), *(metrics.status() for _ in range(5)))

    asyncio.run(ask())
    assert source.num_calls == 1


def test_the_hottest_passages_are_told(tmp_path: Path) -> None:
    metrics = ServerMetrics(Source(), "m", shows_passages=True)
    tokens = [*b"abc", *b"Some words  here", *b"other"]
    for bounds in (((3, 19),), ((3, 19), (19, 24))):
        metrics.request(ParsedPrompt(tokens, chunk_bounds=bounds), SamplingParams(), 0.0)
    metrics.request(ParsedPrompt([*b"secret"], chunk_bounds=((0, 6),), salt=b"tenant"), SamplingParams(), 0.0)
    passages = get(metrics, "/status").json()["passages"]
    assert [(each["tokens"], each["uses"]) for each in passages] == [(16, 2), (5, 1)]
    assert all(each["text"] for each in passages)
    silent = ServerMetrics(Source(), "m")
    silent.request(ParsedPrompt(tokens, chunk_bounds=((3, 19),)), SamplingParams(), 0.0)
    assert get(silent, "/status").json()["passages"] == []


def test_rare_passages_are_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr("vllm_blend.entrypoints.openai.metrics.hot_passages.MAX_PASSAGES", 4)
    passages = HotPassages(Source().get_tokenizer())
    passages.count(ParsedPrompt([0, 0, 1], chunk_bounds=((0, 1), (1, 2))))
    for token in range(2, 100):
        passages.count(ParsedPrompt([token, 1], chunk_bounds=((0, 1),)))
        assert len(passages.top(99)) <= 8
    assert passages.top(1)[0].num_uses == 2
