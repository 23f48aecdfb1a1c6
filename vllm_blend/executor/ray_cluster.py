"""This process's connection to a Ray cluster, and what the process has there already."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import ray
from ray.util.client import ray as client
from ray.util.placement_group import get_current_placement_group

from vllm_blend.checks import require

PLACE = "VLLM_BLEND_RAY_PLACE"  # the environment variable by which an actor's own process knows the actor's place


class _OwnConnection:
    """The connection that engines of this process have made: the last one to end closes it. It belongs to the process,
    as Ray's does."""

    lock = threading.RLock()  # collecting garbage may end an engine at any time
    users = 0
    connection: str | None = None


def join_cluster() -> Callable[[], None]:
    """Connect this process to Ray unless it is connected: to the cluster of RAY_ADDRESS or of this machine, else to one
    that is started. Return what undoes that; a connection that was there before stays.

    Raises ValueError for a client that is not on the cluster, and the errors of `ray.init`.
    """
    own = _OwnConnection
    with own.lock:
        if not ray.is_initialized():
            ray.init()
            try:
                _check_is_on_cluster()
            except ValueError:
                ray.shutdown()
                raise
            own.users, own.connection = 0, connection_id()
        _check_is_on_cluster()
        if own.connection != connection_id():
            return lambda: None
        own.users += 1
        joined = own.connection

    def leave() -> None:
        with own.lock:
            if not is_connected(joined):  # perhaps the program has ended the connection
                return
            own.users -= 1
            if own.users == 0:
                ray.shutdown()

    return leave


def _check_is_on_cluster() -> None:
    require(
        not client.is_connected(),
        "distributed_executor_backend='ray' needs this program to run on a node of the cluster, as rank 0 is in it, "
        "but it is connected by ray://: start it there, with `ray job submit` for example",
    )


def connection_id() -> str:
    """Return which connection to Ray this process has."""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()}/{context.get_job_id()}"  # the first job of every cluster has the same number


def is_connected(connection: str | None) -> bool:
    """Return whether this process still has a connection: at its exit Ray's may be gone before others'."""
    return bool(ray.is_initialized()) and connection_id() == connection


@dataclass(frozen=True)
class Place:
    """What Ray has reserved for this process. A program that is no actor has nothing."""

    is_actor: bool = False
    group: str | None = None  # the placement group of the actor, in hexadecimal digits
    resources: dict[str, float] = field(default_factory=dict)

    @classmethod
    def current(cls) -> Place:
        """Return the place of this process, which is connected to Ray. The engine process of an `AsyncLLM` has that of
        the actor that has started it."""
        context = ray.get_runtime_context()
        if context.worker.mode != ray.WORKER_MODE:
            return cls(**json.loads(os.environ[PLACE])) if PLACE in os.environ else cls()
        group = get_current_placement_group()
        return cls(True, None if group is None else group.id.hex(), dict(context.get_assigned_resources()))

    def has(self, resource: str) -> bool:
        """Return whether a whole CPU or GPU is reserved for this process."""
        return self.resources.get(resource, 0.0) >= 1.0


def environment_of_engine() -> Mapping[str, str]:
    """Return the variables by which the engine process that this process starts finds its cluster and its place; none
    if this process is not connected to Ray. Raises ValueError for a client that is not on the cluster."""
    if not ray.is_initialized():
        return {}
    _check_is_on_cluster()
    address = ray.get_runtime_context().gcs_address
    return {"RAY_ADDRESS": address, PLACE: json.dumps(asdict(Place.current()))}
