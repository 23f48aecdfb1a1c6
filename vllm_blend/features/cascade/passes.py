"""Cascade attention in a worker: blocks that several requests of a pass share are attended once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.checks import require
from vllm_blend.features.cascade.backend import CascadeBackend, cascade_step
from vllm_blend.features.cascade.config import CascadeConfig
from vllm_blend.features.cascade.graphs import CascadeGraphs
from vllm_blend.features.cascade.planner import CascadePlanner, min_saved_tokens
from vllm_blend.worker.batch import Drawn, Span
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.memory import GRAPHS_REMEDY, must_fit
from vllm_blend.worker.passes import WorkerExtension, WorkerSpec


class CascadePasses(WorkerExtension):
    """Plans what the requests of a pass share, and attends it once, by graphs of its own where all requests decode."""

    def __init__(self, config: CascadeConfig, spec: WorkerSpec) -> None:
        self.spec = spec
        block_size, self._least = spec.config.cache.block_size, min_saved_tokens(on_gpu=spec.device.type == "cuda")
        self.planner = CascadePlanner(block_size, self._least)
        self.graphs: CascadeGraphs | None = None

    def build(self, parts: DeviceParts, graph_pool: Any) -> None:
        """Capture the graphs. Raises ValueError if the backend cannot attend shared blocks apart."""
        spec, backend = self.spec, parts.backend
        require(
            spec.device.type == "cpu" or backend.capturable_cascade,
            f"cascade_attention needs our kernels for decoding, but attention is computed by {backend.name}: leave "
            "cascade_attention out, or give attention_backend='cuda'",
        )
        if graph_pool is None:
            return
        planner = CascadePlanner(parts.cache.block_size, self._least, max_levels=1)
        sizes = (spec.config.scheduler.max_num_seqs, spec.max_model_len)
        with must_fit("the CUDA graphs of cascade attention", GRAPHS_REMEDY, spec.device), torch.inference_mode():
            self.graphs = CascadeGraphs(parts, planner, *sizes, pool=graph_pool)

    def replay(self, spans: Sequence[Span], drawn: Drawn) -> torch.Tensor | None:
        """Return the hidden states of a decode step that shares enough blocks, None for any other."""
        if self.graphs is None or any(span.drafts for span in spans):
            return None
        return self.graphs.run(spans, drawn)

    def wrap_backend(
        self, backend: AttentionBackend, spans: Sequence[Span], metadata: AttentionMetadata
    ) -> AttentionBackend:
        """Return what attends the shared blocks of this pass once; `backend` if it shares too little."""
        data = self.planner.plan(spans)
        if data is None:
            return backend
        step = cascade_step(data, metadata, self.planner.block_size)
        return CascadeBackend(backend, [backend.another() for _ in step.levels], step)
