"""Copies of blocks between the device's pages and the host pool: at once, in a thread, or on a stream of a GPU.

Both sides of a submitted copy must be left alone until its ticket is done. Only `Ticket.wait` waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from vllm_blend.features.offload.block_pool import HostBlockPool
from vllm_blend.ops.e4m3 import as_bytes
from vllm_blend.ops.host_copy import to_device


class Ticket(ABC):
    """A copy that was submitted."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether both sides may be used again. Raises what the copy raised."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the copy has finished or failed."""


class BlockCopies(ABC):
    """Copies between `key`, `value` [layers, num_blocks, block_size, kv_heads, head_dim] and a host pool."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, host: HostBlockPool) -> None:
        self.key, self.value, self.on_host = as_bytes(key), as_bytes(value), as_bytes(host.data)

    @abstractmethod
    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> Ticket:
        """Begin to copy device block i to host block i, or back."""

    def _copy(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> None:
        for pages, half in ((self.key, 0), (self.value, 1)):
            for device, host in zip(device_blocks, host_blocks, strict=True):
                target, source = self.on_host[host, half], pages[:, device]
                if not to_host:
                    target, source = source, target
                target.copy_(source)


@dataclass(frozen=True)
class _FutureTicket(Ticket):
    copied: Future[None]

    def done(self) -> bool:
        return self.copied.done() and self.copied.result() is None

    def wait(self) -> None:
        wait([self.copied])


class PlainCopies(BlockCopies):
    """Copies before `submit` returns: the same request has the same placement at every step of every run."""

    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> Ticket:
        copied: Future[None] = Future()
        self._copy(device_blocks, host_blocks, to_host)
        copied.set_result(None)
        return _FutureTicket(copied)


class ThreadCopies(BlockCopies):
    """Copies in a thread of its own, in the order of submission, while the engine goes on. The thread ends when the
    last reference to this object is gone."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, host: HostBlockPool) -> None:
        super().__init__(key, value, host)
        self._thread = ThreadPoolExecutor(1, "offload-copies")

    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> Ticket:
        return _FutureTicket(self._thread.submit(self._copy, list(device_blocks), list(host_blocks), to_host))


@dataclass(frozen=True)
class _StreamTicket(Ticket):
    event: torch.cuda.Event
    staged: torch.Tensor  # its memory must not be used again before the event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class StreamCopies(BlockCopies):
    """Copies on a stream of their own. They wait for what the current stream has queued so far, so a block that has
    just changed owner is not touched before its last reader is done; only `Ticket.wait` waits for them.

    Blocks are gathered on the device first, so that each crosses the link in one copy.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, host: HostBlockPool) -> None:
        super().__init__(key, value, host)
        self.stream = torch.cuda.Stream(key.device)

    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> Ticket:
        device = self.key.device
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            index = to_device(torch.tensor(list(device_blocks), dtype=torch.int64), device)
            if to_host:  # [blocks, 2, layers, block_size, kv_heads, head_dim], as on the host
                both = (self.key[:, index], self.value[:, index])
                staged = torch.stack([pages.transpose(0, 1) for pages in both], 1)
                for row, host in zip(staged, host_blocks, strict=True):
                    self.on_host[host].copy_(row, non_blocking=True)
            else:
                shape = (len(host_blocks), *self.on_host.shape[1:])
                staged = torch.empty(shape, dtype=self.key.dtype, device=device)
                for row, host in zip(staged, host_blocks, strict=True):
                    row.copy_(self.on_host[host], non_blocking=True)
                self.key.index_copy_(1, index, staged[:, 0].transpose(0, 1))
                self.value.index_copy_(1, index, staged[:, 1].transpose(0, 1))
            event = torch.cuda.Event()
            event.record(self.stream)
        return _StreamTicket(event, staged)
