"""What starts the processes of an engine's ranks: the choices of `distributed_executor_backend`."""

from __future__ import annotations

import importlib.util

from vllm_blend.checks import require
from vllm_blend.config import EngineConfig, ExecutorBackend


def choose_backend(config: EngineConfig) -> ExecutorBackend:
    """Return the backend of an engine: as asked for; by default "mp" for several ranks. One rank needs none but "uni".

    Raises ValueError, and ImportError that says what to install.
    """
    asked, size = config.distributed_executor_backend, config.tensor_parallel_size
    if size == 1:
        return "uni"
    require(
        asked != "uni",
        f"distributed_executor_backend='uni' is one process, but tensor_parallel_size is {size}: give 'mp' or 'ray', "
        "or leave one of the two out",
    )
    if asked == "ray":
        _check_ray_is_installed()
    return "ray" if asked == "ray" else "mp"


def _check_ray_is_installed() -> None:
    found = importlib.util.find_spec("ray")
    if found is None or found.origin is None:  # a folder of that name is no module
        raise ImportError(
            "distributed_executor_backend='ray' needs ray: run pip install 'vllm-blend[ray]', or give 'mp'", name="ray"
        )
