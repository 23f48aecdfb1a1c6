"""What an engine asks of the workers that run its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from vllm_blend.core.step import SchedulerOutput
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.request import Request
from vllm_blend.worker.runner_output import RunnerOutput
from vllm_blend.worker.worker import Worker


class WorkerLostError(RuntimeError):
    """A worker has ended, so no step can be run any more."""


class Executor(Protocol):
    """Runs steps. `driver_worker` is the worker in this process; `driver_worker.model_runner.model` is the model, or
    rank 0's share of it, as scripts for vLLM reach it."""

    driver_worker: Worker

    def execute_model(self, output: SchedulerOutput) -> RunnerOutput:
        """Run a step up to its logits, or queue it. Raises WorkerLostError."""

    def draw(self, result: RunnerOutput) -> None:
        """Draw the tokens of the last step, as `ModelRunner.draw` does, before another step is run."""

    def settle(self, result: RunnerOutput) -> None:
        """Wait for a step's tokens. Raises WorkerLostError if a worker has ended meanwhile: they may then be wrong."""

    def prefill_chunk(self, request: Request, max_tokens: int) -> ChunkKV:
        """Compute the KV of a chunk at once, as `ModelRunner.prefill_chunk` does. Raises WorkerLostError."""

    def collected_chunk(self, request: Request) -> ChunkKV:
        """Return the KV that the steps of a request have collected, which is to be kept."""

    def forget(self, requests: Sequence[Request]) -> None:
        """Keep nothing of requests that have finished."""

    def check(self) -> None:
        """Raise WorkerLostError if a worker has ended."""

    def shutdown(self) -> None:
        """End the other workers, if there are any."""
