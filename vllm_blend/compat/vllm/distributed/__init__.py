"""`vllm.distributed`: this process is rank 0 of every engine, whose groups are its own: nothing is to tear down."""

from .parallel_state import (
    cleanup_dist_env_and_memory,
    destroy_distributed_environment,
    destroy_model_parallel,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    init_distributed_environment,
    initialize_model_parallel,
)

__all__ = [
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "init_distributed_environment",
    "initialize_model_parallel",
]
