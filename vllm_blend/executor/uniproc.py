"""One worker in this process."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from vllm_blend.config import EngineConfig
from vllm_blend.core.scheduler import SchedulerOutput
from vllm_blend.worker.model_runner import RunnerOutput
from vllm_blend.worker.worker import Worker


class UniProcExecutor:
    """Runs steps on its only worker. `driver_worker.model_runner.model` is the model, as scripts for vLLM reach it."""

    def __init__(
        self,
        config: EngineConfig,
        hf_config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.driver_worker = Worker(config, hf_config, dtype, device, max_model_len)

    def execute_model(self, output: SchedulerOutput) -> RunnerOutput:
        return self.driver_worker.model_runner.execute(output)
