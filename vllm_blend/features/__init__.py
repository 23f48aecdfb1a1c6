"""The features of the engine: which there are, and which of them exclude each other.

A feature is a folder here. It adds to the step loop (`engine/extension.py`) and to the forward pass
(`worker/passes.py`), which import no feature: they ask the settings that are listed here for what the feature adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_blend.checks import require
from vllm_blend.config import EngineConfig, FeatureConfig
from vllm_blend.devices import FP8_CACHE_DTYPES
from vllm_blend.features.cascade.config import CascadeConfig
from vllm_blend.features.kv_compress.config import KVCompressConfig
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.features.offload.config import OffloadConfig
from vllm_blend.features.spec_decode.config import SpeculativeConfig
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.urls import redact_repr

FEATURES: tuple[type[FeatureConfig], ...] = (
    SpeculativeConfig,
    OffloadConfig,
    KVCompressConfig,
    CascadeConfig,
    StructuredOutputsConfig,
    KVEventsConfig,
)

_HEAD_PAGES = "pages of single heads can neither be verified against drafts, nor moved by chunk, nor shared"
EXCLUSIONS: tuple[tuple[type[FeatureConfig], type[FeatureConfig], str], ...] = (
    (CascadeConfig, OffloadConfig, "pages that move are no longer shared"),
    (KVCompressConfig, SpeculativeConfig, _HEAD_PAGES),
    (KVCompressConfig, OffloadConfig, _HEAD_PAGES),
    (KVCompressConfig, CascadeConfig, _HEAD_PAGES),
)


def check_ranks(config: EngineConfig) -> None:
    """Raise ValueError for an option that is given, but does not work with the ranks that are asked for."""
    if config.tensor_parallel_size == 1:
        return
    used: dict[str, Any] = {
        "quantization": config.model.quantization,
        "chunk_store_path": config.chunk_store.path,
        "chunk_store_url": config.chunk_store.url,
        "blend_controller": config.blend.controller or None,
    }
    given = [f"{name}={redact_repr(value)}" for name, value in used.items() if value is not None]
    given += [feature.name for feature in config.features if feature.is_on and not feature.works_across_ranks]
    require(
        not given,
        f"{', '.join(given)} needs tensor_parallel_size=1, but it is {config.tensor_parallel_size}: leave one of the "
        "two out",
    )


def check_cache_dtype(config: EngineConfig) -> None:
    """Raise ValueError for an option that excludes an FP8 cache."""
    dtype, stored = config.cache.kv_cache_dtype, config.chunk_store.format
    require(
        dtype not in FP8_CACHE_DTYPES or stored == "auto",
        f"kv_cache_dtype={dtype!r} and chunk_store_format={stored!r} exclude each other, as the chunks of an FP8 cache "
        "have eight bits already: leave one of them out",
    )


def check_exclusions(features: Sequence[FeatureConfig]) -> None:
    """Raise ValueError for two features that are on and exclude each other, with the reason."""
    used = {type(feature): feature for feature in features if feature.is_on}
    for one, other, reason in EXCLUSIONS:
        require(
            one not in used or other not in used,
            f"{one.name} and {other.name} exclude each other, as {reason}: leave one of them out",
        )
