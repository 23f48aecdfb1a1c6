"""What a cached KV is worth: one file per metric, one registry of all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm_blend.kv_compress.metrics.base import BlockView, EvictionMetric, HeadView, LayerView, Rotary, Window
from vllm_blend.kv_compress.metrics.expected_attention import ExpectedAttention
from vllm_blend.kv_compress.metrics.keydiff import KeyDiff
from vllm_blend.kv_compress.metrics.knorm import KNorm
from vllm_blend.kv_compress.metrics.kv_compress import KVCompress
from vllm_blend.kv_compress.metrics.random import Random
from vllm_blend.kv_compress.metrics.snapkv import SnapKV
from vllm_blend.kv_compress.metrics.streaming_llm import StreamingLLM
from vllm_blend.registry import enter

METRICS: dict[str, type[EvictionMetric]] = {}


def register_metric(metric: type[EvictionMetric]) -> type[EvictionMetric]:
    """Make a metric usable by its `name`. Works as a decorator on a user's own class."""
    return enter(METRICS, "metric", metric)


def make_metric(name: str, **settings: Any) -> EvictionMetric:
    """The metric registered as `name` with these settings, the fields of its class.

    Raises ValueError for an unknown name, listing the known ones, and for a setting that the metric does not have.
    """
    if name not in METRICS:
        raise ValueError(f"kvc_metric={name!r} is unknown: use one of {sorted(METRICS)}, or register your own")
    known = setting_names(name)
    for setting in settings:
        if setting not in known:
            raise ValueError(f"kvc_metric={name!r} has no setting {setting!r}: it has {sorted(known) or 'none'}")
    return METRICS[name](**settings)


def setting_names(name: str) -> frozenset[str]:
    """The settings that the metric registered as `name` has."""
    return frozenset(field.name for field in fields(METRICS[name]))  # type: ignore[arg-type]


for _metric in (KVCompress, SnapKV, ExpectedAttention, KeyDiff, KNorm, StreamingLLM, Random):
    register_metric(_metric)

__all__ = [
    "METRICS",
    "BlockView",
    "EvictionMetric",
    "HeadView",
    "LayerView",
    "Rotary",
    "Window",
    "make_metric",
    "register_metric",
    "setting_names",
]
