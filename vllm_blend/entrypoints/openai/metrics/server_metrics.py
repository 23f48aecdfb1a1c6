"""What a server knows of itself: the engine's metrics and its own, for Prometheus and for the status page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from transformers import PreTrainedTokenizerBase

from vllm_blend.config import EngineConfig
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.engine.metrics import Metric
from vllm_blend.entrypoints.openai.metrics.engine_families import engine_families, tier_values
from vllm_blend.entrypoints.openai.metrics.hot_passages import HotPassages
from vllm_blend.entrypoints.openai.metrics.recorder import Recorder, RequestRecord
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.sampling_params import SamplingParams

ENGINE_SECONDS = 5.0  # an engine that does not answer within them counts as down
FRESH_SECONDS = 0.5  # for which the engine's answer is used again
NUM_PASSAGES = 10  # on the status page
ENGINE_UP_HELP = "Whether the engine answers: 1, or 0."
CACHE_CONFIG_HELP = (
    "How the KV cache is configured, in labels; the value is 1. num_gpu_blocks is what was measured, or given."
)
_TIER_FIELDS = ("hits", "misses", "chunks", "bytes", "bytes_read", "bytes_written", "load_seconds")
_FOUND = "vllm_blend:found_tokens_"
_BLOCKS = "vllm_blend:kv_cache_blocks"


class MetricsSource(Protocol):
    """What is read of an engine: `AsyncLLM` has it."""

    config: EngineConfig

    def get_tokenizer(self) -> PreTrainedTokenizerBase: ...

    async def check_health(self) -> None: ...

    async def get_metrics(self) -> list[Metric]: ...


class ServerMetrics(Collector):
    """The metrics of one server. `shows_passages`: let the status page show how the hottest passages begin; a server
    with tenants must not."""

    def __init__(self, engine: MetricsSource, model_name: str, shows_passages: bool = False) -> None:
        self._engine, self.model_name = engine, model_name
        self.recorder = Recorder(model_name)
        self.passages = HotPassages(engine.get_tokenizer()) if shows_passages else None
        self._started = time.monotonic()
        self._read: list[Metric] | None = None  # what the engine has said last; None if it is down
        self._problem: str | None = None  # why it has said nothing
        self._num_blocks: int | None = None  # of the KV cache, as the engine has said last
        self._read_at = -FRESH_SECONDS
        self._reading = asyncio.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def request(self, prompt: ParsedPrompt, params: SamplingParams, arrival_time: float) -> RequestRecord:
        """Return the record of a new request, a context in which it runs."""
        if self.passages is not None:
            self.passages.count(prompt)
        return self.recorder.request(params, arrival_time)

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
        yield from engine_families(self._read or [], self.model_name)
        yield from self.recorder.collect()

    def _cache_config(self) -> dict[str, Any]:
        """Return the settings of the KV cache and, as in vLLM, the number of its blocks once it is known."""
        return {**vars(self._engine.config.cache), "num_gpu_blocks": self._num_blocks}

    async def status(self) -> dict[str, Any]:
        """Return what the status page shows. Numbers of the engine are null while it is down."""
        metrics = await self._ask_engine()
        values = {metric.name: metric.value for metric in metrics}
        recent = self.recorder.recent
        return {
            "model": self.model_name,
            "uptime_seconds": time.monotonic() - self._started,
            "engine_up": self._read is not None,
            "engine_problem": self._problem,
            "requests": {
                "running": values.get("vllm:num_requests_running"),
                "waiting": values.get("vllm:num_requests_waiting"),
                "finished": sum(self.recorder.finished.values()),
                "failed": sum(self.recorder.failed.values()),
                "refused": sum(self.recorder.refused.values()),
            },
            "first_token_seconds": recent.percentiles(recent.first_tokens),
            "inter_token_seconds": recent.percentiles(recent.steps),
            "per_second": recent.rates(),
            "kv_cache_usage": values.get("vllm:kv_cache_usage_perc"),
            "tokens": _tokens(values),
            "found": [
                {"source": name.removeprefix(_FOUND), "tokens": value}
                for name, value in values.items()
                if name.startswith(_FOUND) and value
            ],
            "tiers": _tiers(metrics),
            "passages": [
                {"text": passage.text, "tokens": passage.num_tokens, "uses": passage.num_uses}
                for passage in (self.passages.top(NUM_PASSAGES) if self.passages else ())
            ],
        }

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
                blocks = [each.value for each in self._read or () if each.name == _BLOCKS]
                self._num_blocks = int(blocks[0]) if blocks else self._num_blocks
        return self._read or []


def _tokens(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the tokens of all prompts by how they were computed, in the words of the usage field (`usage_details`)."""
    prompt = values.get("vllm:prompt_tokens")
    found: dict[str, float | None] = dict.fromkeys(("cached", "reused", "stored", "recomputed"))
    if prompt is not None:
        cached = sum(value for name, value in values.items() if name.startswith(_FOUND))
        stored = values.get("vllm_blend:blend_encoded_tokens", 0)
        reused = cached - values.get(f"{_FOUND}prefix_cache", 0)
        # What is found of a prompt that is being composed counts before the prompt does.
        found |= {"cached": cached, "reused": reused, "stored": stored, "recomputed": max(0, prompt - cached - stored)}
    return {"prompt": prompt, "generated": values.get("vllm:generation_tokens"), **found}


def _tiers(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return the tiers of the chunk store, as the status page has them. What a tier does not measure is 0."""
    return [
        {
            "name": name,
            **{field: values.get(field, 0) for field in _TIER_FIELDS},
            "errors": values.get("faults", 0) + values.get("writes_dropped", 0),
        }
        for name, values in tier_values(metrics).items()
    ]
