"""The options of KV-Compress: how much of a request's KV is kept, which of it, and when the rest is evicted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from vllm_blend.checks import at_least, require, share_of
from vllm_blend.config import FeatureConfig
from vllm_blend.features.kv_compress.metrics import METRICS, EvictionMetric, make_metric, setting_names
from vllm_blend.options import OptionGroup, check_options, option

Allocation = Literal["global", "layer", "head"]
AllocationChoice = Literal["auto", "global", "layer", "head"]
Aggregation = Literal["L1-sum", "L1-avg", "L2-sum", "L2-avg"]


def _as_python_numbers(group: OptionGroup) -> None:
    """Replace NumPy's numbers in a group by Python's."""
    for name, value in vars(group).items():
        if isinstance(value, np.generic):
            object.__setattr__(group, name, value.item())


@dataclass(frozen=True)
class CompressionSettings(OptionGroup):
    """Limits on what one request keeps. A field that is None sets none.

    `target_compression_rate` is the kept share of a request's KVs, in (0, 1]; `max_cache_tokens` the number of tokens
    that the KVs it keeps would make up if every head kept as many. The last `protected_window_size` tokens and the
    first `num_sinks` are never evicted.
    """

    title: ClassVar[str] = "KV-Compress: what a request keeps, if it does not say so itself"

    target_compression_rate: float | None = option(
        None, "share of its KVs that a request keeps, in (0, 1]; by default all", check=share_of("a request's KVs")
    )
    max_cache_tokens: int | None = option(
        None, "how many tokens' KVs a request keeps, instead of a share", check=at_least(1)
    )
    protected_window_size: int = option(32, "tokens at the end of a request that are never evicted", check=at_least(1))
    num_sinks: int = option(4, "tokens at the beginning of a request that are never evicted", check=at_least(0))
    compress_once: bool = option(False, "compress a request's prompt, and not again as its answer grows")

    def __post_init__(self) -> None:
        check_options(self)  # requests have these settings too: no class stands before the name in an error
        _as_python_numbers(self)
        rate, budget = self.target_compression_rate, self.max_cache_tokens
        require(
            rate is None or budget is None,
            f"target_compression_rate={rate} and max_cache_tokens={budget} are both given: keep one of them",
        )
        least = self.protected_window_size + self.num_sinks
        require(
            budget is None or budget >= least,
            f"max_cache_tokens={budget} is below what is never evicted, protected_window_size="
            f"{self.protected_window_size} and num_sinks={self.num_sinks} tokens: raise it, or lower these",
        )

    @property
    def evicts(self) -> bool:
        """Return whether anything may ever be evicted."""
        return self.max_cache_tokens is not None or (self.target_compression_rate or 1.0) < 1.0

    def kept_tokens(self, num_tokens: int) -> int:
        """Return how many tokens' worth of KVs a request of `num_tokens` tokens keeps."""
        if self.max_cache_tokens is not None:
            return min(num_tokens, self.max_cache_tokens)
        # 0.07 of 100 is 7, whatever the product rounds to.
        kept = math.ceil(num_tokens * (self.target_compression_rate or 1.0) - 1e-9)
        return min(num_tokens, max(kept, self.protected_window_size + self.num_sinks))


@dataclass(frozen=True)
class KVCompressConfig(FeatureConfig):
    """KV-Compress (Rehg, 2024): per-head eviction that frees pages. With `enable_kvc`, requests may have settings of
    their own; the ones here are for requests that have none.

    `kvc_metric` says what a KV is worth, `kvc_allocation` which heads compete for the kept pages: all heads of all
    layers ("global"), the heads of a layer ("layer", as in Ada-KV), or none ("head": each keeps as many). "auto" is
    "global" for metrics that are sums of attention, which mean the same in every head, and "head" for the others. The
    last `prefill_metric_collection_window_size` queries of a prompt are looked at; a query does not count for the keys
    within `metric_collection_buffer_size` positions before it.

    A request is compressed when its prompt has been computed, and again after every `kvc_interval` tokens of its own.
    All requests are compressed when `new_token_limit` tokens have been appended to all of them since the last time, and
    when pages run short. At most `max_kv_per_compression` KVs are sorted at a time, but always those of one request at
    least; the requests that are left out come next.
    """

    title: ClassVar[str] = "KV-Compress"
    name: ClassVar[str] = "enable_kvc"
    extension: ClassVar[str | None] = "vllm_blend.features.kv_compress.extension:make_compression"
    worker_extension: ClassVar[str | None] = "vllm_blend.features.kv_compress.passes:CompressionPasses"
    divides_blends: ClassVar[bool] = False

    enable_kvc: bool = option(False, "evict the KVs that each head needs least, and free their pages (KV-Compress)")
    settings: CompressionSettings = CompressionSettings()
    kvc_interval: int = option(128, "how many tokens a request grows by between two compressions", check=at_least(1))
    new_token_limit: int | None = option(
        None, "compress all requests as soon as they have grown by this many tokens in all", check=at_least(1)
    )
    max_kv_per_compression: int = option(1 << 24, "how many KVs are sorted at a time", check=at_least(1))
    metric_collection_buffer_size: int = option(
        0, "how many keys right before a query its attention does not count for", check=at_least(0)
    )
    prefill_metric_collection_window_size: int = option(
        32, "how many of a prompt's last queries the metric looks at", check=at_least(1)
    )
    kvc_metric: str = option("kv_compress", f"how the worth of a KV is measured: {', '.join(METRICS)}")
    metric_aggregation: Aggregation = option(
        "L2-sum", "how kv_compress sums up attention: L1-sum, L1-avg, L2-sum or L2-avg"
    )
    kvc_allocation: AllocationChoice = option(
        "auto", "which heads compete for pages: global (all), layer (Ada-KV), head (all keep as many) or auto"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _as_python_numbers(self)
        given = self.settings.target_compression_rate, self.settings.max_cache_tokens
        for name, value in zip(("target_compression_rate", "max_cache_tokens"), given, strict=True):
            require(
                self.enable_kvc or value is None,
                f"{name}={value}, but the engine does not compress: give enable_kvc=True too, or leave it out",
            )
        self.check(self.settings)
        self.make_metric()
        self._check_used()

    def _check_used(self) -> None:
        """Raise ValueError for a setting that the metric would not look at."""
        known = setting_names(self.kvc_metric)
        for setting, name in (("aggregation", "metric_aggregation"), ("buffer", "metric_collection_buffer_size")):
            value = getattr(self, name)
            require(
                setting in known or value == getattr(KVCompressConfig, name),
                f"{name}={value!r} means nothing to kvc_metric={self.kvc_metric!r}: leave it out, or use "
                "kvc_metric='kv_compress'",
            )

    def make_metric(self) -> EvictionMetric:
        """Return the metric, with those of the settings that it has."""
        settings = {"aggregation": self.metric_aggregation, "buffer": self.metric_collection_buffer_size}
        known = setting_names(self.kvc_metric) if self.kvc_metric in METRICS else frozenset()
        return make_metric(self.kvc_metric, **{name: value for name, value in settings.items() if name in known})

    @property
    def is_on(self) -> bool:
        return self.enable_kvc

    @property
    def allocation(self) -> Allocation:
        """Return which heads compete for the kept pages."""
        if self.kvc_allocation != "auto":
            return self.kvc_allocation
        return "global" if self.make_metric().comparable else "head"

    def check(self, settings: CompressionSettings) -> None:
        """Raise ValueError if a request's settings do not go with the engine's."""
        require(
            settings.protected_window_size >= self.metric_collection_buffer_size,
            f"protected_window_size={settings.protected_window_size} is below metric_collection_buffer_size="
            f"{self.metric_collection_buffer_size}: KVs that no query has counted for yet could be evicted; raise the "
            "first, or lower the second",
        )

    def settings_of(self, asked: dict[str, Any]) -> CompressionSettings:
        """Return the settings of a request: what it asks for itself, and the engine's for what it leaves None.

        Raises ValueError naming the field and the fix.
        """
        given = {name: value for name, value in asked.items() if value is not None}
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
