"""What a server knows of itself: the engine's metrics and its own, for Prometheus and for the status page."""

from __future__ import annotations

import asyncio
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from transformers import PreTrainedTokenizerBase

from vllm_blend.config import EngineConfig
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.engine.metrics import Metric
from vllm_blend.entrypoints.openai.metrics.engine_families import engine_families, tenant_bytes, tier_values
from vllm_blend.entrypoints.openai.metrics.hot_passages import HotPassages
from vllm_blend.entrypoints.openai.metrics.meanings import ENDS, FAILURES, FOUND_IN, OTHER_REFUSAL, REFUSALS, TIERS
from vllm_blend.entrypoints.openai.metrics.recent import share
from vllm_blend.entrypoints.openai.metrics.recorder import Recorder, RequestRecord
from vllm_blend.entrypoints.openai.tenancy import ANYONE
from vllm_blend.entrypoints.verdicts import served_setting
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.sampling_params import SamplingParams

ENGINE_SECONDS = 5.0  # an engine that does not answer within them counts as down
FRESH_SECONDS = 0.5  # for which the engine's answer is used again
NUM_PASSAGES = 10  # on the status page
ENGINE_UP_HELP = "Whether the engine answers: 1, or 0."
CACHE_CONFIG_HELP = (
    "How the KV cache is configured, in labels; the value is 1. num_gpu_blocks is what was measured, or given."
)
_TIER_FIELDS = {name: name for name in ("hits", "misses", "chunks", "bytes", "bytes_read", "bytes_written")} | {
    "load_seconds": "load_seconds",
    "faults": "read_errors",
    "writes_dropped": "write_errors",
    "writes_refused": "refused",
}
TOKEN_KINDS = ("prompt", "cached", "reused", "stored", "recomputed", "generated")
_PREFILL_SPEED = "vllm_blend:prefill_peak_tokens_per_second"
_LOAD_SECONDS = re.compile(r"vllm_blend:chunk_store_[a-z]+_load_seconds")
_BLOCKS = "vllm_blend:kv_cache_blocks"


class MetricsSource(Protocol):
    """What is read of an engine: `AsyncLLM` has it."""

    config: EngineConfig

    def get_tokenizer(self) -> PreTrainedTokenizerBase: ...

    async def check_health(self) -> None: ...

    async def get_metrics(self) -> list[Metric]: ...


class ServerMetrics(Collector):
    """The metrics of one server. `shows_passages`: let the status page show how the hottest passages begin; a server
    with tenants must not. `shows_tenants`: tell the names of tenants and what each has used."""

    def __init__(
        self, engine: MetricsSource, model_name: str, shows_passages: bool = False, shows_tenants: bool = False
    ) -> None:
        self._engine, self.model_name = engine, model_name
        self.recorder = Recorder(model_name, shows_tenants)
        self.passages = HotPassages(engine.get_tokenizer()) if shows_passages else None
        self._started = time.monotonic()
        self._read: list[Metric] | None = None  # what the engine has said last; None if it is down
        self._problem: str | None = None  # why it has said nothing
        self._num_blocks: int | None = None  # of the KV cache, as the engine has said last
        self._loading = LoadSeconds()
        self._read_at = -FRESH_SECONDS
        self._reading = asyncio.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def request(
        self, prompt: ParsedPrompt, params: SamplingParams, arrival_time: float, tenant: str = ANYONE.name
    ) -> RequestRecord:
        """Return the record of a new request, a context in which it runs."""
        if self.passages is not None:
            self.passages.count(prompt)
        return self.recorder.request(params, arrival_time, tenant)

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        await self._ask_engine()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """Yield all metrics but those of the process, for Prometheus's client."""
        up = GaugeMetricFamily("vllm_blend:engine_up", ENGINE_UP_HELP, labels=["model_name"])
        up.add_metric([self.model_name], float(self._read is not None))
        yield up
        labels = {"model_name": self.model_name} | {name: str(value) for name, value in self._cache_config().items()}
        info = GaugeMetricFamily("vllm:cache_config_info", CACHE_CONFIG_HELP, labels=[*labels])
        info.add_metric([*labels.values()], 1)
        yield info
        yield from engine_families(self._read or [], self.model_name, self.recorder.shows_tenants)
        yield from self.recorder.collect()

    def _cache_config(self) -> dict[str, Any]:
        """Return the settings of the KV cache and, as in vLLM, the number of its blocks once it is known."""
        return {**vars(self._engine.config.cache), "num_gpu_blocks": self._num_blocks}

    async def status(self) -> dict[str, Any]:
        """Return what the status page shows. Numbers of the engine are null while it is down."""
        metrics = await self._ask_engine()
        values = {metric.name: metric.value for metric in metrics}
        recorder, recent, counts = self.recorder, self.recorder.recent, self.recorder.tokens
        return {
            "model": self.model_name,
            "versions": _versions(),
            "blending": _blending(self._engine.config),
            "uptime_seconds": time.monotonic() - self._started,
            "engine_up": self._read is not None,
            "engine_problem": self._problem,
            "requests": {
                "running": values.get("vllm:num_requests_running"),
                "waiting": values.get("vllm:num_requests_waiting"),
                "finished": sum(recorder.finished.values()),
                "failed": sum(recorder.failed.values()),
                "refused": sum(recorder.refused.values()),
            },
            "reuse": {"recent": recent.reuse(), "share": share(counts.cached, counts.prompt), **self._saved(values)},
            "history": {"hour": recent.hour.points(), "day": recent.day.points()},
            "first_token_seconds": recent.percentiles(recent.first_tokens),
            "inter_token_seconds": recent.percentiles(recent.steps),
            "per_second": recent.rates(),
            "kv_cache_usage": values.get("vllm:kv_cache_usage_perc"),
            "tokens": {name: getattr(counts, name) for name in TOKEN_KINDS},
            "found": [
                {"source": source, "meaning": FOUND_IN[source], "tokens": count, "share": count / counts.cached}
                for source, count in counts.found.most_common()
                if count
            ],
            "errors": _errors(recorder),
            "tiers": _tiers(metrics),
            "tenants": _tenants(recorder, tenant_bytes(metrics)) if recorder.shows_tenants else [],
            "passages": [
                {"text": passage.text, "tokens": passage.num_tokens, "uses": passage.num_uses}
                for passage in (self.passages.top(NUM_PASSAGES) if self.passages else ())
            ],
        }

    def _saved(self, values: Mapping[str, float]) -> dict[str, float | None]:
        """Return what reuse has saved: at least the time in which the fastest prefill would have computed what was
        found, less the time in which it was loaded. None before a prefill was measured."""
        speed, found = values.get(_PREFILL_SPEED), self.recorder.tokens.cached
        saved = found / speed - self._loading.total if speed else None
        return {"saved_seconds": saved, "load_seconds": self._loading.total, "prefill_tokens_per_second": speed or None}

    async def _ask_engine(self) -> list[Metric]:
        """Read the engine's metrics, unless that has just been done; return them, or none while it is down."""
        async with self._reading:
            if time.monotonic() - self._read_at >= FRESH_SECONDS:
                self._read, self._problem = None, None
                try:
                    await self._engine.check_health()
                    self._read = await asyncio.wait_for(self._engine.get_metrics(), ENGINE_SECONDS)
                except EngineDeadError as error:
                    self._problem = str(error)
                except TimeoutError:
                    self._problem = f"the engine has not answered within {ENGINE_SECONDS:g} seconds: a step takes long"
                self._read_at = time.monotonic()
                loads = [each.value for each in self._read or () if _LOAD_SECONDS.fullmatch(each.name)]
                if self._read is not None:
                    self._loading.update(sum(loads))
                blocks = [each.value for each in self._read or () if each.name == _BLOCKS]
                self._num_blocks = int(blocks[0]) if blocks else self._num_blocks
        return self._read or []


class LoadSeconds:
    """The time in which an engine, and those before it in its place, have loaded stored passages."""

    def __init__(self) -> None:
        self._earlier = self._last = 0.0

    @property
    def total(self) -> float:
        return self._earlier + self._last

    def update(self, seconds: float) -> None:
        """Take what an engine says, whose total begins at zero when it starts."""
        if seconds < self._last:
            self._earlier += self._last
        self._last = seconds


@cache
def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("vllm-blend", "torch", "transformers")}
    return packages | {"python": platform.python_version()}


def _blending(config: EngineConfig) -> dict[str, Any]:
    """Return how passages are reused by requests that do not ask for another way; nulls if they are not."""
    setting = served_setting(config) if config.blend.enable_blending else (None, None, None)
    return dict(zip(("rule", "recompute_ratio", "encoding_context"), setting, strict=True))


def _errors(recorder: Recorder) -> list[dict[str, Any]]:
    """Return the errors that there were, by kind, the most frequent first."""
    recent = recorder.recent.errors()
    totals = {name: (recorder.finished[name], text) for name, text in ENDS.items()}
    totals |= {name: (recorder.failed[name], text) for name, text in FAILURES.items()}
    refused = {str(code): (count, REFUSALS.get(code, OTHER_REFUSAL)) for code, count in recorder.refused.items()}
    rows = [
        {"kind": f"HTTP {name}" if name.isdigit() else name, "meaning": text, "last_hour": recent[name], "total": count}
        for name, (count, text) in (totals | refused).items()
        if count
    ]
    return sorted(rows, key=lambda row: (-row["last_hour"], -row["total"]))


def _tenants(recorder: Recorder, stored: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return what tenants have used, those with the most tokens first."""
    ranked = sorted(recorder.tenants.items(), key=lambda item: -item[1].prompt)
    return [
        {
            "name": name,
            "now": f"{counts.running} running now, {counts.generated:,} tokens generated",
            "prompt": counts.prompt,
            "share": share(counts.cached, counts.prompt),
            "stored": stored[name],
            "errors": counts.failed + counts.refused,
        }
        for name, counts in ranked
    ]


def _tiers(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return the tiers of the chunk store, as the status page has them. What a tier does not measure is 0."""
    return [
        {
            "name": name,
            "meaning": TIERS[name],
            "hit_share": share(values.get("hits", 0), values.get("hits", 0) + values.get("misses", 0)),
            **{shown: values.get(field, 0) for field, shown in _TIER_FIELDS.items()},
        }
        for name, values in tier_values(metrics).items()
    ]
