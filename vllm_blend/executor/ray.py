"""Ranks that are actors on the nodes of a Ray cluster. Ray places them and tells of their end, and nothing else: steps
travel over TCP connections from rank 0, tensors through torch.distributed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from vllm_blend.child_process import describe_status, import_path
from vllm_blend.distributed.ranks import Ranks, connect, store_at
from vllm_blend.executor.base import WorkerLostError
from vllm_blend.executor.ray_cluster import PLACE, connection_id, is_connected, join_cluster
from vllm_blend.executor.ray_placement import Placement, reserve
from vllm_blend.executor.ray_worker import RankActor, RayBootstrap
from vllm_blend.executor.several_ranks import POLL_SECONDS, SeveralRanksExecutor, pickle_settings
from vllm_blend.executor.tcp_links import LinkListener
from vllm_blend.executor.worker_process import WorkerSettings
from vllm_blend.log_lines import LogSettings

START_SECONDS = 120.0  # in which actors start, and again in which they call rank 0
LOOK_SECONDS = 1.0  # between two questions to Ray whether an actor lives: its connection tells of most ends at once
# Environment variables that actors get from rank 0's process, as other nodes have been started with others.
_PREFIXES = ("VLLM_BLEND_", "HF_", "NCCL_", "GLOO_")
_SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


class ActorProcess:
    """The process of another rank, which is an actor."""

    def __init__(self, actor: Any, work: Any, host: str, pid: int) -> None:
        self._actor, self._work, self._host, self.pid = actor, work, host, pid
        self._connection = connection_id()
        self._next_look = 0.0

    @property
    def name(self) -> str:
        return f"the actor in process {self.pid} on {self._host}"

    def wait(self, timeout: float) -> str | None:
        if timeout == 0.0 and time.monotonic() < self._next_look:
            return None
        if not is_connected(self._connection):
            return "is out of reach, as this process has left the Ray cluster"
        self._next_look = time.monotonic() + LOOK_SECONDS
        ready, _ = ray.wait([self._work], timeout=timeout)
        if not ready:
            return None
        try:
            return describe_status(ray.get(self._work))
        except RayError as error:
            return f"has died: {_one_line(error)}"

    def kill(self) -> None:
        _kill(self._actor, self._connection)


class RayExecutor(SeveralRanksExecutor):
    """Runs steps on several ranks on a Ray cluster."""

    @property
    def pids(self) -> list[int]:
        """Return the processes of the ranks 1, 2, ..., on their own nodes."""
        return [process.pid for process in self._team.processes if isinstance(process, ActorProcess)]

    def _start(self, settings: WorkerSettings, size: int) -> Callable[[], Ranks]:
        team = self._team
        team.undo.callback(join_cluster())
        placement = reserve(size, settings.device, settings.config.ray_placement_timeout, team.undo)
        host = ray.util.get_node_ip_address()
        store = store_at(host, 0, leads=True)
        listener = LinkListener(host)
        try:
            self._start_actors(settings, size, placement, listener, store.port)
            team.links.extend(self._links(listener))
        finally:
            listener.close()
        return lambda: connect(0, size, store, settings.device, team.links, host)

    def _start_actors(
        self, settings: WorkerSettings, size: int, placement: Placement, listener: LinkListener, store_port: int
    ) -> None:
        secrets = {name: os.environ[name] for name in _SECRETS if name in os.environ}
        hidden = {PLACE, *_SECRETS}
        public = {key: value for key, value in os.environ.items() if key.startswith(_PREFIXES) and key not in hidden}
        environment = {"env_vars": public | {"PYTHONPATH": import_path()}}
        threads = max(1, torch.get_num_threads() // size)
        started = []
        for rank in range(1, size):
            own = settings.on(rank)
            if own.device.type == "cuda":
                own = replace(own, device=torch.device("cuda", 0))  # the only one that Ray lets it see
            bootstrap = RayBootstrap(
                own, rank, size, listener.address, store_port, LogSettings.current(), threads, secrets
            )
            data = pickle_settings(bootstrap, size)
            actor = ray.remote(RankActor).options(**placement.options(rank), runtime_env=environment).remote()
            self._team.undo.callback(_kill, actor, connection_id())
            started.append((data, actor))
        try:
            places = ray.get([actor.where.remote() for _, actor in started], timeout=START_SECONDS)
        except GetTimeoutError as error:
            raise WorkerLostError(
                f"the actors of {size - 1} ranks did not start within {START_SECONDS:g} seconds: see `ray status` for "
                "what their nodes lack"
            ) from error
        except RayError as error:
            raise WorkerLostError(f"the actor of a rank could not start: {_one_line(error)}") from error
        for (data, actor), (host, pid) in zip(started, places, strict=True):
            self._team.processes.append(ActorProcess(actor, actor.run.remote(data), host, pid))

    def _links(self, listener: LinkListener) -> list[Connection]:
        """Return the connections to the ranks 1, 2, ..., which call here. Raises WorkerLostError if one does not."""
        links: dict[int, Connection] = {}
        deadline = time.monotonic() + START_SECONDS
        processes = self._team.processes
        while len(links) < len(processes):
            called = listener.accept(POLL_SECONDS)
            if called is not None:
                links[called[0]] = called[1]
            for rank, process in enumerate(processes, 1):
                how = process.wait(0.0) if rank not in links else None
                if how is None and rank not in links and time.monotonic() > deadline:
                    how = f"has not called {listener.address.host} within {START_SECONDS:g} seconds"
                if how is not None:
                    for link in links.values():
                        link.close()
                    raise WorkerLostError(f"the worker of rank {rank} ({process.name}) {how}")
        return [links[rank] for rank in range(1, len(processes) + 1)]


def _kill(actor: Any, connection: str) -> None:
    if is_connected(connection):
        ray.kill(actor)


def _one_line(error: RayError) -> str:
    return " ".join(str(error).split())
