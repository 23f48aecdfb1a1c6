"""Offloading in a worker: the queries of a step are kept, and in mode "exact" chunks on the host are attended there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.core.step import ScheduledRequest
from vllm_blend.features.offload.attention import ExactBackend, GraphTap, LastTap, QueryTap, tapped_layers
from vllm_blend.features.offload.block_pool import HostBlockPool
from vllm_blend.features.offload.config import OffloadConfig
from vllm_blend.features.offload.residency import OFFLOAD
from vllm_blend.worker.batch import Span
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.passes import GraphHook, WorkerExtension, WorkerSpec


class OffloadPasses(WorkerExtension):
    """Owns the host's blocks. A step in which a chunk is attended on the host runs without CUDA graphs."""

    host: HostBlockPool  # once it is built

    def __init__(self, config: OffloadConfig, spec: WorkerSpec) -> None:
        """Prepare the passes of a worker. Raises ValueError for an unknown predictor."""
        self.config, self.exact = config, config.mode == "exact"
        self.tapped_layers = tapped_layers(config, spec.shape.num_layers)
        self._last = LastTap()

    def build(self, parts: DeviceParts, graph_pool: Any) -> None:
        """Take the host's memory. Raises ValueError naming the setting if it is too little, or cannot be pinned."""
        layers, _, block_size, kv_heads, head_dim = parts.cache.key.shape
        shape = (layers, block_size, kv_heads, head_dim, parts.cache.key.dtype)
        self.host = HostBlockPool(int(self.config.host_gib * 2**30), *shape, pinned=parts.cache.key.is_cuda)

    def take_queries(self) -> QueryTap | None:
        """Return the queries of the last step, which are not kept any longer; None if none were kept."""
        tap, self._last.tap = self._last.tap, None
        return tap

    def graph_hook(self) -> GraphHook | None:
        """Return a hook that keeps the queries of a replayed step."""
        return GraphTap(self.tapped_layers, self._last) if self.tapped_layers else None

    def needs_eager(self, items: Sequence[ScheduledRequest]) -> bool:
        """Return whether some chunk is attended on the host."""
        return self.exact and any(item.request.num_missing_blocks for item in items)

    def hook(self, items: Sequence[ScheduledRequest]) -> LayerHook | None:
        """Return a hook that keeps the queries of the step; None if no predictor looks at them."""
        is_tapped = self.tapped_layers and any(OFFLOAD.get(item.request) is not None for item in items)
        self._last.tap = QueryTap(self.tapped_layers) if is_tapped else None
        return self._last.tap

    def wrap_backend(
        self, backend: AttentionBackend, spans: Sequence[Span], metadata: AttentionMetadata
    ) -> AttentionBackend:
        """Return what attends the missing blocks on the host; `backend` if none is missing."""
        if not self.exact:
            return backend
        away = [(index, span.request) for index, span in enumerate(spans) if span.request.num_missing_blocks]
        placed = [(index, OFFLOAD.require(request).residency) for index, request in away]
        missing = {index: residency.host_table() for index, residency in placed if residency is not None}
        return ExactBackend(backend, self.host, missing) if missing else backend
