"""Training on several devices: each has a replica of the model and rows of its own, and all take the same steps.

    torchrun --nproc-per-node 2 -m vllm_blend.finetune.command MODEL --output DIR ...

Each process computes its part of a batch, and the gradients are averaged (data parallelism). What must not differ, such
as the time that has passed, is what rank 0 says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Replicas:
    """The processes that train one model, as the one of `rank` sees them. `ALONE` is a run of one process."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Return whether this process reports and saves."""
        return self.rank == 0

    def agree(self, number: float) -> float:
        """Return rank 0's number."""
        if self.size == 1:
            return number
        told = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(told, 0)
        return float(told)

    def mean(self, number: float) -> float:
        """Return the mean of the replicas' numbers."""
        if self.size == 1:
            return number
        total = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.size

    def begin_alike(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give all replicas the parameters of rank 0: adapters begin with random numbers."""
        if self.size > 1:
            for parameter in parameters:
                dist.broadcast(parameter.detach(), 0)

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace the gradients by their mean over all replicas."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch._utils._flatten_dense_tensors(gradients)  # one exchange, not one for each
        dist.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(mean)

    def share_of(self, name: str, number: int) -> int:
        """Return this replica's part of a number. Raises ValueError, naming it, if it cannot be divided."""
        if number % self.size:
            raise ValueError(f"{name} {number} must be a multiple of the {self.size} processes of torchrun")
        return number // self.size


ALONE = Replicas()


def _world_size() -> int:
    """Return how many processes torchrun has started. Raises ValueError if it was something else that set only a part
    of torchrun's variables."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"the environment variable WORLD_SIZE is {text!r}: unset it, or start with torchrun")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(text) > 1 and missing:
        raise ValueError(f"WORLD_SIZE is {text}, but {missing[0]} is not set: unset WORLD_SIZE, or start with torchrun")
    return int(text)


@contextmanager
def joined(device: torch.device) -> Iterator[tuple[Replicas, torch.device]]:
    """Yield the processes that torchrun has started, and this one's device: its own GPU, or the CPU. Without torchrun
    it is alone on `device`."""
    size = _world_size()
    if size == 1:
        yield ALONE, device
        return
    if device.type == "cuda":
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise ValueError(
                f"torchrun has started more processes than there are GPUs, {count}: lower --nproc-per-node"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Replicas(dist.get_rank(), size), device
    finally:
        dist.destroy_process_group()
