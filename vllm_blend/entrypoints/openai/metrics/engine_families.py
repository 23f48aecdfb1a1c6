"""The engine's counters and gauges as metrics for Prometheus: vLLM's names where vLLM has them, and ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from vllm_blend.engine.metrics import Counter, Metric

_HELP = {
    "vllm:prompt_tokens": "Prompt tokens of requests that began to run.",
    "vllm:generation_tokens": "Tokens that were generated.",
    "vllm:prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens that were found in the prefix cache.",
    "vllm:num_preemptions": "Times that a request had to give its pages back.",
    "vllm:num_requests_running": "Requests in the batch.",
    "vllm:num_requests_waiting": "Requests that wait for the batch.",
    "vllm:kv_cache_usage_perc": "Share of the KV cache that is used; 1 is all of it.",
    "vllm_blend:found_tokens": "Prompt tokens whose KV was found, by where it was.",
    "vllm_blend:blended_prompts": "Prompts that were blended from chunks.",
    "vllm_blend:blend_reused_tokens": "Tokens of blended prompts whose stored KV was used as it was.",
    "vllm_blend:blend_encoded_tokens": "Tokens of chunks that were encoded for the prompt that came with them.",
    "vllm_blend:blend_recomputed_tokens": "Tokens of blended prompts that were computed in the blend.",
    "vllm_blend:chunk_store_hits": "Chunks that a tier was asked for and had.",
    "vllm_blend:chunk_store_misses": "Chunks that a tier was asked for and did not have, or could not give.",
    "vllm_blend:chunk_store_errors": "Chunks that a tier failed to read or to write.",
    "vllm_blend:chunk_store_read_bytes": "Bytes that were read from a tier.",
    "vllm_blend:chunk_store_written_bytes": "Bytes that were written to a tier.",
    "vllm_blend:chunk_store_load_seconds": "Time in which a tier was read from.",
    "vllm_blend:chunk_store_bytes": "Bytes that a tier keeps.",
    "vllm_blend:chunk_store_chunks": "Chunks that a tier keeps.",
    "vllm_blend:chunks_encoded": "Chunks whose KV was computed for the store.",
    "vllm_blend:chunks_registered": "Chunks that are registered by name.",
}
# Totals that the engine reports as gauges.
_TOTALS = {
    "vllm:num_preemptions",
    "vllm_blend:chunks_encoded",
    "vllm_blend:chunk_loads_late",
    "vllm_blend:prompts_started_early",
    "vllm_blend:prompts_started_again",
    "vllm_blend:kv_compressions",
    "vllm_blend:kvs_evicted",
    "vllm_blend:head_pages_freed",
    "vllm_blend:chunk_promotions",
    "vllm_blend:chunk_evictions",
    "vllm_blend:offload_bytes_moved",
    "vllm_blend:offload_moves_dropped",
    "vllm_blend:offload_plans_dropped",
    "vllm_blend:controller_prompts_raised",
    "vllm_blend:controller_chunks_recomputed",
}
_TIER = re.compile(r"vllm_blend:chunk_store_([a-z]+)_(\w+)")
# What a tier reports -> the metric without its prefix, whether it is a total, and its label besides the tier.
_TIER_METRICS: dict[str, tuple[str, bool, dict[str, str]]] = {
    "hits": ("hits", True, {}),
    "misses": ("misses", True, {}),
    "faults": ("errors", True, {"operation": "read"}),
    "writes_dropped": ("errors", True, {"operation": "write"}),
    "bytes_read": ("read_bytes", True, {}),
    "bytes_written": ("written_bytes", True, {}),
    "load_seconds": ("load_seconds", True, {}),
    "bytes": ("bytes", False, {}),
    "chunks": ("chunks", False, {}),
}
_FOUND = "vllm_blend:found_tokens_"
# The server's process counts these itself: only it knows of stop strings and of callers that left.
_OWN = "vllm:request_success_"


def engine_families(metrics: Iterable[Metric], model_name: str) -> Iterator[Family]:
    """Yield metrics of an engine, each name once, with the label `model_name` and those that its name had in it."""
    families: dict[str, Family] = {}
    for metric in metrics:
        if metric.name.startswith(_OWN):
            continue
        name, is_total, labels = _describe(metric)
        labels = {"model_name": model_name, **labels}
        if name not in families:
            kind = CounterMetricFamily if is_total else GaugeMetricFamily
            families[name] = kind(name, _HELP.get(name, f"The engine's {name.partition(':')[2]}."), labels=[*labels])
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


def _describe(metric: Metric) -> tuple[str, bool, dict[str, str]]:
    """Return the name of a metric without the _total of counters, whether it is a counter, and its labels."""
    name = metric.name.removesuffix("_total")
    if name.startswith(_FOUND):
        return _FOUND.removesuffix("_"), True, {"source": name.removeprefix(_FOUND)}
    tier = _TIER.fullmatch(name)
    if tier and tier[2] in _TIER_METRICS:
        what, is_total, labels = _TIER_METRICS[tier[2]]
        return f"vllm_blend:chunk_store_{what}", is_total, {"tier": tier[1], **labels}
    return name, isinstance(metric, Counter) or name in _TOTALS, {}
