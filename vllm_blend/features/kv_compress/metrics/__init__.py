"""Metrics that score cached KVs: one file per metric, one registry of all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm_blend.features.kv_compress.metrics.base import BlockView, EvictionMetric, HeadView, LayerView, Window
from vllm_blend.features.kv_compress.metrics.expected_attention import ExpectedAttention
from vllm_blend.features.kv_compress.metrics.keydiff import KeyDiff
from vllm_blend.features.kv_compress.metrics.knorm import KNorm
from vllm_blend.features.kv_compress.metrics.kv_compress import KVCompress
from vllm_blend.features.kv_compress.metrics.random import RandomEviction
from vllm_blend.features.kv_compress.metrics.snapkv import SnapKV
from vllm_blend.features.kv_compress.metrics.streaming_llm import StreamingLLM
from vllm_blend.registry import Registry

METRICS: Registry[type[EvictionMetric]] = Registry(
    "metric", "kvc_metric", (KVCompress, SnapKV, ExpectedAttention, KeyDiff, KNorm, StreamingLLM, RandomEviction)
)
register_metric = METRICS.register  # as a decorator, it makes a class of your own usable by its `name`


def make_metric(name: str, **settings: Any) -> EvictionMetric:
    """Return the metric registered as `name` with these settings, the fields of its class.

    Raises ValueError for an unknown name, listing the known ones, and for a setting that the metric does not have.
    """
    metric = METRICS.find(name)
    known = setting_names(name)
    for setting in settings:
        if setting not in known:
            raise ValueError(f"kvc_metric={name!r} has no setting {setting!r}: it has {sorted(known) or 'none'}")
    return metric(**settings)


def setting_names(name: str) -> frozenset[str]:
    """Return the settings that the metric registered as `name` has."""
    return frozenset(field.name for field in fields(METRICS[name]))  # type: ignore[arg-type]


__all__ = [
    "METRICS",
    "BlockView",
    "EvictionMetric",
    "HeadView",
    "LayerView",
    "Window",
    "make_metric",
    "register_metric",
    "setting_names",
]
