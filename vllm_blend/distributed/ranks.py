"""The processes that run one model together, each with a part of every layer: tensor parallelism.

Rank 0 leads: it schedules, chooses tokens and answers; the others follow. Tensors travel through torch.distributed, by
a process group of the engine's own (a program may have several engines, and groups of its own). What rank 0 decides in
the middle of a step travels through connections of Python's multiprocessing, pipes on one machine, as any object.
"""

from __future__ import annotations

import ctypes
import select
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from vllm_blend.distributed.shared_memory import SharedMemory, share_memory

TIMEOUT = timedelta(minutes=10)  # of one exchange between ranks that all live
LOOK = timedelta(seconds=1)  # between two looks, while an exchange lasts, at whether the other ranks are there
MEETING = timedelta(minutes=2)  # in which ranks that have started find one another
LOOPBACK = "127.0.0.1"  # for ranks that are on one machine

_c10d: Any = dist  # as Any, since torch's annotations leave much of it out


class RankLostError(RuntimeError):
    """An exchange with the other ranks has failed: one of them has ended, or does not answer."""


class Ranks:
    """The ranks of an engine, as one of them sees them. `ONE_RANK` is an engine without others.

    All ranks call the same methods in the same order. `links` are the connections to the ranks 1, 2, ... on rank 0, and
    the one to rank 0 on the others.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, links: Sequence[Connection] = ()
    ) -> None:
        self.rank, self.size, self.links = rank, size, tuple(links)
        self._group = group
        self._shared: SharedMemory | None = None
        self._leaving = threading.Lock()
        self._has_left = False

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    @property
    def waits_on_device(self) -> bool:
        """Return whether an exchange is queued on a GPU, where the host does not see that another rank has ended."""
        return isinstance(self._group, getattr(dist, "ProcessGroupNCCL", ()))

    @property
    def shares_memory(self) -> bool:
        """Return whether small sums go through memory that all ranks see."""
        return self._shared is not None

    def share_memory(self, device: torch.device) -> None:
        """Have small sums go through memory that all ranks see, if all can: for ranks with GPUs, each its own."""
        if not self.waits_on_device:
            return
        shared = share_memory(self.rank, self.size, self.gather_all, device)
        with self._leaving:
            self._shared = shared
            if self._has_left and shared is not None:  # in another thread, which has not seen this memory
                shared.abandon()

    def leave(self) -> None:
        """Take part in no exchange any more. Those that are queued on a GPU end with wrong results. It may be called
        again, from any thread.

        On a GPU this returns when no CUDA graph holds an exchange any more, which NCCL waits for.
        """
        if self._group is None or not self.waits_on_device:
            return
        with self._leaving:
            if not self._has_left:
                self._has_left = True
                if self._shared is not None:
                    self._shared.abandon()
                # Not its destructor: that waits for the others to leave too. It is never run, since Python's collector
                # would hold the interpreter's lock meanwhile, for which the group's own threads may wait.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                self._group.abort()

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `part`, which may be overwritten."""
        if self._shared is not None and self._shared.accepts(part):
            return self._shared.sum(part)
        return self._reduce(part, dist.ReduceOp.SUM)

    def minimum(self, number: int, device: torch.device) -> int:
        """Return the smallest of the ranks' numbers. `device` is the one that the ranks exchange tensors of."""
        if self.size == 1:
            return number
        return int(self._reduce(torch.tensor([number], device=device), dist.ReduceOp.MIN))

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Return on rank 0 all ranks' `part` [rows, n] side by side, [rows, size * n]; on the others [rows, 0]."""
        if self.size == 1:
            return part
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.leads else []
        options = _on_current_stream(dist.GatherOptions())
        options.rootRank = 0
        self._finish(lambda group: group.gather([parts] if parts else [], [part], options))
        return torch.cat(parts, -1) if parts else part[:, :0]

    def gather_all(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' `part`, which are of one shape, in the order of the ranks."""
        if self.size == 1:
            return [part]
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        options = _on_current_stream(_c10d.distributed_c10d.AllgatherOptions())
        self._finish(lambda group: group.allgather([parts], [part], options))
        return parts

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `tensor`; on the others the memory of theirs, of the same shape and dtype, receives it."""
        if self.size > 1:
            options = _on_current_stream(dist.BroadcastOptions())
            options.rootRank = 0
            tensor = tensor.contiguous()
            self._finish(lambda group: group.broadcast([tensor], options))
        return tensor

    def tell(self, message: Any) -> None:
        """Send the other ranks a message, which each of them has to `hear`. For rank 0."""
        for link in self.links:
            try:
                link.send(message)
            except OSError as error:
                raise RankLostError(f"a rank that was to hear of a decision has ended ({error!r})") from error

    def hear(self) -> Any:
        """Wait for what rank 0 tells, and return it. For the other ranks."""
        try:
            return self.links[0].recv()
        except (EOFError, OSError) as error:
            raise RankLostError(f"rank 0 has ended ({error!r})") from error

    def _reduce(self, part: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size == 1:
            return part
        options = _on_current_stream(dist.AllreduceOptions())
        options.reduceOp = operation
        part = part.contiguous()
        self._finish(lambda group: group.allreduce([part], options))
        return part

    def _finish(self, start: Any) -> None:
        """Run an exchange: on a CPU to its end; on a GPU it is queued on the current stream."""
        assert self._group is not None
        try:
            work = start(self._group)
            if work is None:  # it is queued on the current stream
                return
            if self.waits_on_device:
                work.wait()
            else:
                self._wait(work)
        except RankLostError:
            raise
        except RuntimeError as error:  # torch has no type for it
            raise RankLostError(f"the ranks cannot exchange tensors ({error})") from error

    def _wait(self, work: Any) -> None:
        """Wait for an exchange of gloo, which does not see that a machine is gone. The connections do."""
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # which raises what has failed
                    return
            if any(map(has_ended, self.links)):
                # The group's destructor would wait for the exchange to end by its own timeout.
                threading.Thread(target=_outlast, args=(work, self._group), daemon=True, name="lost-exchange").start()
                raise RankLostError("the connection to another rank has ended in the middle of an exchange")


ONE_RANK = Ranks()


def has_ended(link: Connection) -> bool:
    """Return whether the other end of a connection is closed or out of reach, without reading anything."""
    poller = select.poll()
    try:
        poller.register(link, getattr(select, "POLLRDHUP", 0))
    except OSError:  # this end is closed
        return True
    return bool(poller.poll(0))


def _outlast(work: Any, group: Any) -> None:
    """Hold a group until its exchange has ended."""
    with suppress(RuntimeError):
        work.wait()


def _on_current_stream(options: Any) -> Any:
    """Have an exchange of NCCL queued on the current stream, not on one of its own: a CUDA graph then captures it like
    any other kernel, and none of ours, which may wait for all of its blocks to run, ever runs beside it."""
    options.asyncOp = False
    return options


def store_in_folder(folder: str, size: int) -> Any:
    """Return the store in which ranks of one machine find one another: a file in a folder that only they use."""
    return _c10d.FileStore(f"{folder}/ranks", size)


def store_at(host: str, port: int, *, leads: bool) -> Any:
    """Return the store in which ranks of several machines find one another. Rank 0 keeps it, at a free port if `port`
    is 0, and the others call there."""
    return _c10d.TCPStore(host, port, is_master=leads, wait_for_workers=False, timeout=MEETING)


def connect(
    rank: int,
    size: int,
    store: Any,
    device: torch.device,
    links: Sequence[Connection],
    host: str = LOOPBACK,
) -> Ranks:
    """Return the ranks of an engine, when all of them have called this with the same store, which only they use.

    Tensors of a CPU travel through gloo over the interface of `host`, those of GPUs through NCCL.
    """
    store.set_timeout(MEETING)
    if device.type == "cpu":
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = TIMEOUT
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        group = _c10d.ProcessGroupGloo(store, rank, size, options)
    else:
        torch.cuda.set_device(device)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        group = _c10d.ProcessGroupNCCL(store, rank, size, options)
    return Ranks(rank, size, group, links)
