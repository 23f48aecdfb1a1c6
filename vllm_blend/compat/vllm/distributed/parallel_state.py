"""`vllm.distributed.parallel_state`."""

from __future__ import annotations

import gc
from typing import Any

import torch


def get_tensor_model_parallel_world_size() -> int:
    return 1


def get_tensor_model_parallel_rank() -> int:
    return 0


def destroy_model_parallel() -> None:
    """Do nothing, as in a vLLM process that has no groups: the engine never makes any."""


def destroy_distributed_environment() -> None:
    """Do nothing, as in a vLLM process that has no groups: the engine never makes any."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that are no longer referenced."""
    if shutdown_ray:
        raise NotImplementedError("shutdown_ray=True is not supported: call ray.shutdown() yourself")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def init_distributed_environment(*args: Any, **arguments: Any) -> None:
    raise NotImplementedError("init_distributed_environment is not supported: give tensor_parallel_size to LLM")


def initialize_model_parallel(*args: Any, **arguments: Any) -> None:
    raise NotImplementedError("initialize_model_parallel is not supported: give tensor_parallel_size to LLM")
