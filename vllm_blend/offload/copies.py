"""Copies of blocks between the device's pages and the host pool: at once, in a thread, or on a GPU's own stream.

Both sides of a submitted copy must be left alone until its ticket is done. Nothing here waits but `Ticket.wait`.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from vllm_blend.offload.block_pool import HostBlockPool
from vllm_blend.ops.host_copy import to_device


class Ticket(ABC):
    """A copy that was submitted."""

    @abstractmethod
    def done(self) -> bool:
        """Whether both sides may be used again. Raises what the copy raised."""

    @abstractmethod
    def wait(self) -> None:
        """Return when `done` has an answer other than "not yet"."""


class BlockCopies(ABC):
    """Copies between `key`, `value` [layers, num_blocks, block_size, kv_heads, head_dim] and a host pool."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, host: HostBlockPool) -> None:
        self.key, self.value, self.host = key, value, host

    @abstractmethod
    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> Ticket:
        """Begin to copy device block i to host block i, or back."""

    def _copy(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> None:
        for pages, half in ((self.key, 0), (self.value, 1)):
            for device, host in zip(device_blocks, host_blocks, strict=True):
                target, source = self.host.data[host, half], pages[:, device]
                if not to_host:
                    target, source = source, target
                target.copy_(source)


class _Done(Ticket):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class PlainCopies(BlockCopies):
    """Copies before `submit` returns: the same request has the same placement at every step of every run."""

    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> Ticket:
        self._copy(device_blocks, host_blocks, to_host)
        return _Done()


class _ThreadTicket(Ticket):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._over = work, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised where the ticket is looked at
            self._error = error
        finally:
            self._over.set()

    def done(self) -> bool:
        if self._over.is_set() and self._error is not None:
            raise self._error
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()


class ThreadCopies(BlockCopies):
    """Copies in a thread of its own, in the order of submission, while the engine goes on. The thread ends
    when the last reference to this object is gone."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, host: HostBlockPool) -> None:
        super().__init__(key, value, host)
        self._tickets: queue.SimpleQueue[_ThreadTicket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._tickets,), name="offload-copies", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._tickets.put, None).atexit = False

    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> Ticket:
        device, host = list(device_blocks), list(host_blocks)
        ticket = _ThreadTicket(lambda: self._copy(device, host, to_host))
        self._tickets.put(ticket)
        return ticket


def _serve(tickets: queue.SimpleQueue[_ThreadTicket | None]) -> None:
    while (ticket := tickets.get()) is not None:
        ticket.run()
        del ticket  # what it holds keeps this thread alive


class _StreamTicket(Ticket):
    def __init__(self, event: torch.cuda.Event, held: torch.Tensor) -> None:
        self._event, self._held = event, held

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class StreamCopies(BlockCopies):
    """Copies on a stream of their own. They wait for what the current stream has queued so far, so a block that just
    changed owner is not touched before its last reader is done; only `Ticket.wait` waits for them.

    Blocks are gathered on the device first: a block then crosses the link as one piece.
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
                    self.host.data[host].copy_(row, non_blocking=True)
            else:
                shape = (len(host_blocks), *self.host.data.shape[1:])
                staged = torch.empty(shape, dtype=self.key.dtype, device=device)
                for row, host in zip(staged, host_blocks, strict=True):
                    row.copy_(self.host.data[host], non_blocking=True)
                self.key.index_copy_(1, index, staged[:, 0].transpose(0, 1))
                self.value.index_copy_(1, index, staged[:, 1].transpose(0, 1))
            event = torch.cuda.Event()
            event.record(self.stream)
        return _StreamTicket(event, staged)
