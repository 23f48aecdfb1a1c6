"""One worker in this process."""

from __future__ import annotations

from vllm_blend.core.step import SchedulerOutput
from vllm_blend.worker.runner_output import RunnerOutput
from vllm_blend.worker.worker import Worker


class UniProcExecutor:
    """Runs steps on its only worker. `driver_worker.model_runner.model` is the model, as scripts for vLLM reach it."""

    def __init__(self, worker: Worker) -> None:
        self.driver_worker = worker

    def execute_model(self, output: SchedulerOutput) -> RunnerOutput:
        return self.driver_worker.model_runner.execute(output)
