"""The options of an application on Ray Serve: how many replicas there are, what they need, and how they are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vllm_blend.checks import at_least, is_number, not_negative, positive, require
from vllm_blend.options import OptionGroup, option
from vllm_blend.ray.routing import DEFAULT_EPSILON


def _check_resources(name: str, resources: dict[str, Any]) -> None:
    for key, amount in resources.items():
        require(
            is_number(amount) and math.isfinite(amount) and amount >= 0,
            f"{name}={resources!r}: the amount of {key!r} must be a finite number of at least 0",
        )
        require(
            key not in ("CPU", "GPU", "memory"),
            f"{name}={resources!r} names {key}, which Ray does not take there: give num_cpus or num_gpus instead",
        )


def _check_gpus(name: str, gpus: float) -> None:
    not_negative(name, gpus)
    require(gpus <= 1 or gpus == int(gpus), f"{name}={gpus} must be whole if it is above 1, as Ray asks")


@dataclass(frozen=True)
class RayOptions(OptionGroup):
    """Replicas, their resources and the routing among them."""

    title: ClassVar[str] = "Ray Serve"

    replicas: int = option(1, "engines to begin with, and the fewest", check=at_least(1))
    max_replicas: int | None = option(
        None, "engines at most, started as requests pile up (default: always `replicas`)", check=at_least(1)
    )
    target_requests: float | None = option(
        None,
        "requests, running and waiting, that each engine should have: more start another (default: half of "
        "max_num_seqs)",
        check=positive,
    )
    upscale_delay: float = option(30.0, "seconds of too many requests before engines start", check=not_negative)
    downscale_delay: float = option(600.0, "seconds of too few requests before engines end", check=not_negative)
    ingress_replicas: int = option(1, "processes that read requests and choose engines", check=at_least(1))
    ingress_cpus: float = option(1.0, "CPUs that Ray reserves for each of these", check=not_negative)
    routing: Literal["affinity", "least_loaded", "round_robin"] = option(
        "affinity", "how an engine is chosen: by a request's passages, by load alone, or in turn"
    )
    epsilon: float = option(
        DEFAULT_EPSILON,
        "with affinity, the share by which an engine may have more waiting requests than the mean",
        check=not_negative,
    )
    retries: int = option(
        2, "times that a request is sent again whose engine's replica ended before its answer began", check=not_negative
    )
    num_cpus: float = option(1.0, "CPUs that Ray reserves for each engine", check=not_negative)
    num_gpus: float | None = option(
        None,
        "GPUs that Ray reserves for each engine (default: tensor_parallel_size on GPUs, else 0)",
        check=_check_gpus,
    )
    resources: dict[str, Any] | None = option(
        None, "other resources that Ray reserves for each engine, by name", check=_check_resources
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_replicas is None or self.max_replicas >= self.replicas,
            f"max_replicas={self.max_replicas} is less than replicas={self.replicas}: raise it, or leave it out",
        )
        for name in ("target_requests", "upscale_delay", "downscale_delay"):
            changed = getattr(self, name) != getattr(type(self), name)
            require(
                self.max_replicas is not None or not changed,
                f"{name} is for autoscaling: give max_replicas as well, or leave it out",
            )

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas
