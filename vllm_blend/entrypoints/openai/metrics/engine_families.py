"""The engine's counters and gauges as metrics for Prometheus: vLLM's names where vLLM has them, and ours."""

from __future__ import annotations

import re
from collections import Counter as Counted
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from vllm_blend.engine.metrics import Counter, Metric
from vllm_blend.entrypoints.openai.metrics.names import ENGINE_METRICS, EngineMetric
from vllm_blend.kv_store.tiers import MEMORY

_TIER = re.compile(r"vllm_blend:chunk_store_([a-z]+)_(\w+)")
# What a tier reports -> the metric without its prefix, and its label besides the tier.
_TIER_METRICS: dict[str, tuple[str, dict[str, str]]] = {
    "hits": ("hits", {}),
    "misses": ("misses", {}),
    "faults": ("errors", {"operation": "read"}),
    "writes_dropped": ("errors", {"operation": "write"}),
    "writes_refused": ("refused", {}),
    "bytes_read": ("read_bytes", {}),
    "bytes_written": ("written_bytes", {}),
    "load_seconds": ("load_seconds", {}),
    "bytes": ("bytes", {}),
    "chunks": ("chunks", {}),
}
_FOUND = "vllm_blend:found_tokens_"
_LOAD_SPEED = re.compile(r"vllm_blend:controller_([a-z]+)_bytes_per_second")
# Prometheus wants the unit at the end of a name.
_RENAMED = {"vllm_blend:offload_bytes_moved": "vllm_blend:offload_moved_bytes"}
# The server's process counts these itself: only it knows of stop strings and of callers that left.
_OWN = "vllm:request_success_"
_TENANT_BYTES = re.compile(r"vllm_blend:tenant_chunk_bytes_([a-z]+)_(.+)")


def engine_families(metrics: Iterable[Metric], model_name: str, shows_tenants: bool = True) -> Iterator[Family]:
    """Yield metrics of an engine, each name once, with the label `model_name` and those that its name had in it; those
    of tenants only if these may be shown."""
    families: dict[str, Family] = {}
    for metric in metrics:
        if metric.name.startswith(_OWN) or (not shows_tenants and _TENANT_BYTES.fullmatch(metric.name)):
            continue
        name, labels = _name_and_labels(metric.name.removesuffix("_total"))
        labels = {"model_name": model_name, **labels}
        if name not in families:
            unknown = EngineMetric(f"The engine's {name.partition(':')[2]}.", isinstance(metric, Counter))
            known = ENGINE_METRICS.get(name, unknown)
            kind = CounterMetricFamily if known.is_total else GaugeMetricFamily
            families[name] = kind(name, known.help, labels=[*labels])
        families[name].add_metric([*labels.values()], metric.value)  # type: ignore[attr-defined]
    yield from families.values()


def tier_values(metrics: Iterable[Metric]) -> dict[str, dict[str, float]]:
    """Return what each tier of the chunk store reports."""
    tiers: dict[str, dict[str, float]] = {}
    for metric in metrics:
        found = _TIER.fullmatch(metric.name)
        if found and found[2] in _TIER_METRICS:
            tiers.setdefault(found[1], {})[found[2]] = metric.value
    return tiers


def tenant_bytes(metrics: Iterable[Metric]) -> Counted[str]:
    """Return the bytes of chunks in memory of each tenant."""
    found = ((_TENANT_BYTES.fullmatch(metric.name), metric.value) for metric in metrics)
    return Counted({match[2]: int(value) for match, value in found if match and match[1] == MEMORY})


def _name_and_labels(name: str) -> tuple[str, dict[str, str]]:
    """Return the name of a metric for Prometheus, and the labels that the engine's name for it has in it."""
    if name.startswith(_FOUND):
        return _FOUND.removesuffix("_"), {"source": name.removeprefix(_FOUND)}
    tier = _TIER.fullmatch(name)
    if tier and tier[2] in _TIER_METRICS:
        what, labels = _TIER_METRICS[tier[2]]
        return f"vllm_blend:chunk_store_{what}", {"tier": tier[1], **labels}
    if tenant := _TENANT_BYTES.fullmatch(name):
        return "vllm_blend:tenant_chunk_bytes", {"tenant": tenant[2], "tier": tenant[1]}
    speed = _LOAD_SPEED.fullmatch(name)
    if speed:
        return "vllm_blend:controller_load_bytes_per_second", {"tier": speed[1]}
    return _RENAMED.get(name, name), {}
