"""Adds to a worker the rows of logits that drafts take, which is all that speculative decoding needs there."""

from __future__ import annotations

from vllm_blend.features.spec_decode.config import SpeculativeConfig
from vllm_blend.worker.passes import WorkerExtension, WorkerSpec


class SpeculationPasses(WorkerExtension):
    """Makes room for the rows of drafts. They are verified in the pass over blocks, as any rows are."""

    def __init__(self, config: SpeculativeConfig, spec: WorkerSpec) -> None:
        self.config = config

    def max_rows(self, num_requests: int) -> int:
        """Return how many rows of logits a step has, those of drafts included."""
        return self.config.most_rows(num_requests)
