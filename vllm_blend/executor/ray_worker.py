"""The actor of a rank other than 0 on a Ray cluster: builds a worker, and runs the steps that rank 0 tells of."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field

import ray
import torch

from vllm_blend.distributed.ranks import Ranks, connect, store_at
from vllm_blend.executor.tcp_links import Address, dial
from vllm_blend.executor.worker_process import WorkerSettings, follow
from vllm_blend.log_lines import LogSettings


@dataclass(frozen=True)
class RayBootstrap:
    """What the actor is told at its start."""

    settings: WorkerSettings
    rank: int
    size: int
    address: Address  # where rank 0 listens
    store_port: int  # of rank 0's store, in which the ranks find one another
    logs: LogSettings
    num_threads: int  # of torch's operators on a CPU
    secrets: dict[str, str] = field(repr=False)  # environment variables that Ray must not show


class RankActor:
    """Runs a rank in the process of an actor."""

    def where(self) -> tuple[str, int]:
        """Return the address of the actor's node, and the actor's process."""
        return ray.util.get_node_ip_address(), os.getpid()

    def run(self, settings: bytes) -> int:
        """Run the rank of a pickled `RayBootstrap` to its end; return an exit status, as its process would. Raises
        OSError or EOFError if rank 0 cannot be reached."""
        bootstrap: RayBootstrap = pickle.loads(settings)
        os.environ.update(bootstrap.secrets)
        bootstrap.logs.apply_to_engine()
        torch.set_num_threads(bootstrap.num_threads)
        link = dial(bootstrap.address, bootstrap.rank)

        def meet() -> Ranks:
            store = store_at(bootstrap.address.host, bootstrap.store_port, leads=False)
            host = ray.util.get_node_ip_address()
            return connect(bootstrap.rank, bootstrap.size, store, bootstrap.settings.device, [link], host)

        try:
            return follow(bootstrap.rank, bootstrap.settings, link, meet)
        finally:
            link.close()
