"""The seam between a worker and its features: passes of their own, parts in the pass over blocks, and their memory.

A step is one pass over the requests in ordinary blocks, and one for each feature that lays the KV of some requests out
in its own way. The runner knows none of them: it splits a step by `Pass.accepts`, and asks each `WorkerExtension` what
it adds to the pass over blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

import torch

from vllm_blend.attention.context import LayerHook
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.config import EngineConfig
from vllm_blend.core.step import ScheduledRequest
from vllm_blend.worker.batch import Drawn, Span
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.kv_cache import CacheShape
from vllm_blend.worker.runner_output import RunnerOutput


@dataclass(frozen=True)
class PassOutput:
    """The logits that a pass computed for the requests that draw a token. They are valid until the next step."""

    logits: torch.Tensor  # [rows, vocab]: a row for each item, and one more for each of its drafts
    items: Sequence[ScheduledRequest]  # in the order of the rows


class Pass(Protocol):
    """A forward pass over some of a step's requests."""

    def accepts(self, item: ScheduledRequest) -> bool:
        """Return whether this pass computes the item."""
        ...

    def run(self, items: Sequence[ScheduledRequest], drawn: Drawn, result: RunnerOutput) -> PassOutput | None:
        """Compute the items, and add what there is to report to `result`; return None if no request draws. `drawn` are
        the tokens of the step before."""
        ...


class GraphHook(LayerHook):
    """A layer hook that the graphs of decode steps capture: it must keep copies of what it sees."""

    def replayed(self, query_start_loc: list[int]) -> None:
        """Take note that the graph has run a step whose request r has the rows from `query_start_loc[r]` on."""


@dataclass(frozen=True)
class WorkerSpec:
    """The facts of a worker that are known before its memory is shared out. `wants_graphs`: steps are replayed as CUDA
    graphs if these can be captured."""

    config: EngineConfig
    device: torch.device
    shape: CacheShape
    max_model_len: int
    wants_graphs: bool


class WorkerExtension:
    """A feature's part of a worker. The worker and its runner call these methods; those of this class add nothing."""

    def bytes_per_block(self) -> int:
        """Return the bytes that the feature keeps beside the K and V of each block."""
        return 0

    def table_bytes(self) -> int:
        """Return the bytes of what the feature keeps beside the cache, at most."""
        return 0

    def bytes_between_steps(self) -> int:
        """Return the bytes that the feature's work between two steps takes, at most."""
        return 0

    def max_rows(self, num_requests: int) -> int:
        """Return how many rows of logits a step of so many requests has, at most."""
        return num_requests

    def build(self, parts: DeviceParts, graph_pool: Any) -> None:
        """Make what the feature has on the device, its CUDA graphs among them. `graph_pool` is the memory of the decode
        graphs, which other graphs may share; None if there are none."""

    def passes(self) -> Sequence[Pass]:
        """Return the feature's own passes, once it is built."""
        return ()

    def graph_hook(self) -> GraphHook | None:
        """Return a new hook for a graph of decode steps, before anything is built."""
        return None

    def needs_eager(self, items: Sequence[ScheduledRequest]) -> bool:
        """Return whether a pass over blocks must run without CUDA graphs."""
        return False

    def replay(self, spans: Sequence[Span], drawn: Drawn) -> torch.Tensor | None:
        """Return the hidden states [rows, hidden_size] of a decode step by a graph of the feature's own, None if none
        fits. They are valid until the next step."""
        return None

    def hook(self, items: Sequence[ScheduledRequest]) -> LayerHook | None:
        """Return what is to see every layer of a pass over blocks that runs without CUDA graphs."""
        return None

    def wrap_backend(
        self, backend: AttentionBackend, spans: Sequence[Span], metadata: AttentionMetadata
    ) -> AttentionBackend:
        """Return the backend that attends in a pass over blocks which runs without CUDA graphs."""
        return backend


def make_worker_extensions(spec: WorkerSpec) -> list[WorkerExtension]:
    """Return what the features that are on add to a worker, in the order of the configuration.

    Raises ValueError naming the setting for what a feature cannot do.
    """
    named = [(feature, feature.worker_extension) for feature in spec.config.features if feature.is_on]
    return [resolve_name(name)(feature, spec) for feature, name in named if name is not None]
