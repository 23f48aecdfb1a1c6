"""How much of a request's KV is kept, which of it, and when the rest is evicted, as users say it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from vllm_blend.checks import check_field_types, require
from vllm_blend.kv_compress.metrics import METRICS, EvictionMetric, make_metric, setting_names

Allocation = Literal["global", "layer", "head"]
AllocationChoice = Literal["auto", "global", "layer", "head"]
Aggregation = Literal["L1-sum", "L1-avg", "L2-sum", "L2-avg"]


def _count(of: Any, name: str, least: int) -> None:
    """Check that a field of a frozen dataclass is at least `least`, and make it Python's int."""
    value = getattr(of, name)
    require(value >= least, f"{name}={value} must be a whole number of at least {least}")
    object.__setattr__(of, name, int(value))


@dataclass(frozen=True)
class CompressionSettings:
    """What one request keeps. A field that is None is not limited.

    `target_compression_rate` is the kept share of a request's KVs, in (0, 1]; `max_cache_tokens` the number of tokens
    that the KVs it keeps would make up if every head kept as many. The last `protected_window_size` tokens and the
    first `num_sinks` are never evicted.
    """

    target_compression_rate: float | None = None
    max_cache_tokens: int | None = None
    protected_window_size: int = 32
    num_sinks: int = 4
    compress_once: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        rate, budget = self.target_compression_rate, self.max_cache_tokens
        require(
            rate is None or budget is None,
            f"target_compression_rate={rate} and max_cache_tokens={budget} are both given: keep one of them",
        )
        require(
            rate is None or 0 < rate <= 1,
            f"target_compression_rate={rate} is the share of KVs that is kept: use a number in (0, 1]",
        )
        if rate is not None:
            object.__setattr__(self, "target_compression_rate", float(rate))
        _count(self, "protected_window_size", 1)
        _count(self, "num_sinks", 0)
        if budget is not None:
            _count(self, "max_cache_tokens", 1)
            least = self.protected_window_size + self.num_sinks
            require(
                budget >= least,
                f"max_cache_tokens={budget} is below what is never evicted, protected_window_size="
                f"{self.protected_window_size} and num_sinks={self.num_sinks} tokens: raise it, or lower these",
            )

    @property
    def evicts(self) -> bool:
        """Whether anything may ever be evicted."""
        return self.max_cache_tokens is not None or (self.target_compression_rate or 1.0) < 1.0

    def kept_tokens(self, num_tokens: int) -> int:
        """How many tokens' worth of KVs a request of `num_tokens` tokens keeps."""
        if self.max_cache_tokens is not None:
            return min(num_tokens, self.max_cache_tokens)
        # 0.07 of 100 is 7, whatever the product rounds to.
        kept = math.ceil(num_tokens * (self.target_compression_rate or 1.0) - 1e-9)
        return min(num_tokens, max(kept, self.protected_window_size + self.num_sinks))


@dataclass(frozen=True)
class KVCompressConfig:
    """KV-Compress (Rehg, 2024): per-head eviction that frees pages. Requests may have settings of their own, where
    `enable_kvc` is given; the ones here are for those that say nothing.

    `kvc_metric` says what a KV is worth, `kvc_allocation` who competes for the kept pages: all heads of all layers
    ("global"), the heads of a layer ("layer", as in Ada-KV), or nobody ("head": each keeps as many). "auto" is "global"
    for metrics that are sums of attention, which mean the same in every head, and "head" for the others. The last
    `prefill_metric_collection_window_size` queries of a prompt are looked at; a query does not count for the keys
    within `metric_collection_buffer_size` positions before it.

    A request is compressed when its prompt has been computed, and again after every `kvc_interval` tokens of its own.
    All are when `new_token_limit` tokens have been appended to all requests since the last time, and when pages run
    short. At most `max_kv_per_compression` KVs are sorted at a time, but always those of one request; whoever is left
    out comes next.
    """

    enable_kvc: bool = False
    settings: CompressionSettings = CompressionSettings()
    kvc_interval: int = 128
    new_token_limit: int | None = None
    max_kv_per_compression: int = 1 << 24
    metric_collection_buffer_size: int = 0
    prefill_metric_collection_window_size: int = 32
    kvc_metric: str = "kv_compress"
    metric_aggregation: Aggregation = "L2-sum"
    kvc_allocation: AllocationChoice = "auto"

    def __post_init__(self) -> None:
        check_field_types(self)
        given = self.settings.target_compression_rate, self.settings.max_cache_tokens
        for name, value in zip(("target_compression_rate", "max_cache_tokens"), given, strict=True):
            require(
                self.enable_kvc or value is None,
                f"{name}={value}, but the engine does not compress: give enable_kvc=True too, or leave it out",
            )
        _count(self, "kvc_interval", 1)
        if self.new_token_limit is not None:
            _count(self, "new_token_limit", 1)
        _count(self, "max_kv_per_compression", 1)
        _count(self, "metric_collection_buffer_size", 0)
        _count(self, "prefill_metric_collection_window_size", 1)
        self.check(self.settings)
        self.make_metric()
        self._check_used()

    def _check_used(self) -> None:
        """Raises ValueError for a setting that the metric would not look at."""
        known = setting_names(self.kvc_metric)
        for setting, name in (("aggregation", "metric_aggregation"), ("buffer", "metric_collection_buffer_size")):
            value = getattr(self, name)
            require(
                setting in known or value == getattr(KVCompressConfig, name),
                f"{name}={value!r} means nothing to kvc_metric={self.kvc_metric!r}: leave it out, or use "
                "kvc_metric='kv_compress'",
            )

    def make_metric(self) -> EvictionMetric:
        """The metric, with those of the settings that it has."""
        settings = {"aggregation": self.metric_aggregation, "buffer": self.metric_collection_buffer_size}
        known = setting_names(self.kvc_metric) if self.kvc_metric in METRICS else frozenset()
        return make_metric(self.kvc_metric, **{name: value for name, value in settings.items() if name in known})

    @property
    def allocation(self) -> Allocation:
        """Who competes."""
        if self.kvc_allocation != "auto":
            return self.kvc_allocation
        return "global" if self.make_metric().comparable else "head"

    def check(self, settings: CompressionSettings) -> None:
        """Raises ValueError where a request's settings do not go with the engine's."""
        require(
            settings.protected_window_size >= self.metric_collection_buffer_size,
            f"protected_window_size={settings.protected_window_size} is below metric_collection_buffer_size="
            f"{self.metric_collection_buffer_size}: KVs that no query has counted for yet could be evicted; raise the "
            "first, or lower the second",
        )

    def check_compressed_chunks(self, settings: CompressionSettings) -> None:
        """Raises ValueError where KV of prompts over compressed chunks cannot be evicted by these settings."""
        require(
            not (settings.evicts and self.make_metric().watches),
            f"kvc_metric={self.kvc_metric!r} looks at the last queries of a prompt in ordinary pages, where one over "
            "compressed chunks (blend_chunk_kept_share) never is: to evict KV of such prompts "
            "(target_compression_rate, max_cache_tokens), use a metric that looks at none, such as keydiff",
        )

    def settings_of(self, wishes: dict[str, Any]) -> CompressionSettings:
        """What holds for a request: its own wishes, where they are not None, before the engine's settings.

        Raises ValueError naming the field and the fix.
        """
        given = {name: value for name, value in wishes.items() if value is not None}
        if not given:
            return self.settings
        require(
            self.enable_kvc,
            f"the request has {', '.join(given)}, but the engine does not compress: give enable_kvc=True to the "
            "engine, or leave them out",
        )
        base = dict(vars(self.settings))
        if given.keys() & {"target_compression_rate", "max_cache_tokens"}:
            base |= {"target_compression_rate": None, "max_cache_tokens": None}
        settings = CompressionSettings(**(base | given))
        self.check(settings)
        return settings
