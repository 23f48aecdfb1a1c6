"""One worker in this process."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_blend.core.step import SchedulerOutput
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.request import Request
from vllm_blend.worker.runner_output import RunnerOutput
from vllm_blend.worker.worker import Worker


class UniProcExecutor:
    """Runs steps on its only worker."""

    def __init__(self, worker: Worker) -> None:
        self.driver_worker = worker

    def execute_model(self, output: SchedulerOutput) -> RunnerOutput:
        return self.driver_worker.model_runner.execute(output)

    def draw(self, result: RunnerOutput) -> None:
        self.driver_worker.model_runner.draw(result)

    def settle(self, result: RunnerOutput) -> None:
        """Do nothing: the code that reads the tokens waits for them."""

    def prefill_chunk(self, request: Request, max_tokens: int) -> ChunkKV:
        return self.driver_worker.model_runner.prefill_chunk(request, max_tokens)

    def collected_chunk(self, request: Request) -> ChunkKV:
        return ChunkKV.collected(request.collected_kv())

    def forget(self, requests: Sequence[Request]) -> None:
        self.driver_worker.model_runner.forget(requests)

    def check(self) -> None:
        """Do nothing: there is no other worker."""

    def shutdown(self) -> None:
        """Do nothing: there is no other worker."""
