"""Memory of the ranks' GPUs that all ranks of one machine see, and sums through it.

NCCL adds up a few hundred KiB, what a decode step has in each layer, in exchanges whose latency is most of their time.
Where all GPUs reach one another's memory, one kernel of ours does it in a single exchange. Larger sums are NCCL's.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_blend.ops import cuda_all_reduce, cuda_library

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 60.0  # in which the first sums end, whatever the ranks still have to load
LOOK_SECONDS = 0.001  # between two looks at whether they have

_MACHINE = Path("/proc/sys/kernel/random/boot_id")  # handles of another machine's memory mean nothing here
_unclosed: list[tuple[int, list[int], torch.device]] = []  # memory that could not be closed at once


class SharedMemory:
    """The memory of all ranks, as rank `rank` sees it. All ranks call `sum` in the same order."""

    def __init__(self, rank: int, addresses: list[int], device: torch.device) -> None:
        self._rank = rank
        # A rank reads all others' parts, but NCCL passes sums on: the more ranks, the sooner NCCL is faster.
        self._most_bytes = cuda_all_reduce.MAX_BYTES // max(1, len(addresses) - 1) // 16 * 16
        self._has_ended = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self._addresses = torch.tensor(addresses, device="cpu")  # whatever the program's default device is
        # Not at the exit of the program: the driver does it then, and the device may be gone.
        weakref.finalize(self, _close_later, rank, addresses, device, os.getpid()).atexit = False

    def abandon(self) -> None:
        """Have all sums, also those that are queued, wait for no other rank any more: they are wrong from now on."""
        with torch.inference_mode():  # a program may have made the engine within it
            self._has_ended[0] = 1  # CUDA is not asked to: it might wait for the very kernel that waits

    def adds_up(self, device: torch.device) -> bool:
        """Try sums of known numbers, which all ranks do at once. Return whether this rank has found the right ones.

        Some machines let a GPU open another's memory although what it writes there is lost or goes elsewhere, where an
        IOMMU redirects PCIe traffic, for example.
        """
        ranks = len(self._addresses)
        numbers = torch.arange(self._most_bytes // 4, device=device) % 1000  # as many float32
        shifts = [1, 2, 3]  # one sum for each half of the memory, and one for the first half again
        parts = [(numbers + (self._rank + 1) * shift).float() for shift in shifts]
        expected = [(ranks * numbers + sum(range(1, ranks + 1)) * shift).float() for shift in shifts]
        # Nothing else is queued meanwhile: CUDA may wait for the sums before it loads a kernel.
        found = [self.sum(part) for part in parts]
        end = torch.cuda.current_stream(device).record_event()
        deadline = time.monotonic() + TRIAL_SECONDS
        try:
            while not end.query():  # CUDA waits for an event without a time limit
                if time.monotonic() > deadline:
                    self.abandon()
                    break
                time.sleep(LOOK_SECONDS)
        except BaseException:  # such as Ctrl-C: CUDA would not free the memory before the sums have ended
            self.abandon()
            raise
        return all(map(torch.equal, found, expected))

    def accepts(self, part: torch.Tensor) -> bool:
        """Return whether `sum` takes this tensor. Only what is alike on all ranks decides: where the tensor lies may
        differ, and a rank that left a sum to NCCL alone would wait for the others for ever."""
        size = part.numel() * part.element_size()
        fits = size <= self._most_bytes and size % 16 == 0
        return fits and part.is_cuda and part.dtype in cuda_all_reduce.SUM_DTYPES

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `part`, which may be overwritten."""
        part = part.contiguous()
        if part.data_ptr() % 16:
            part = part.clone()
        if part.numel():
            cuda_all_reduce.all_reduce(part, self._addresses, self._rank, self._has_ended)
        return part


def share_memory(
    rank: int, size: int, gather: Callable[[torch.Tensor], list[torch.Tensor]], device: torch.device
) -> SharedMemory | None:
    """Return the memory that the ranks share, when all of them have called this; None, on all of them, if one of them
    cannot, as its kernels are not there or its GPU does not reach another one. `gather` gives all ranks' tensors."""

    def exchange(own: bytes) -> list[bytes]:
        return [
            bytes(each.cpu().tolist()) for each in gather(torch.tensor(list(own), dtype=torch.uint8, device=device))
        ]

    def all_can(this_one_can: bool) -> bool:
        return all(each[0] for each in exchange(bytes([this_one_can])))

    _close_the_unclosed()
    addresses: dict[int, int] = {}  # by rank
    machine = _MACHINE.read_text().strip().encode() if _MACHINE.exists() else b""
    problem, handle = "", bytes(cuda_all_reduce.HANDLE_BYTES)
    if not cuda_library.is_available():
        problem = "the CUDA kernels are not available"
    elif size > cuda_all_reduce.MAX_RANKS:
        problem = f"there are more than {cuda_all_reduce.MAX_RANKS} ranks"
    elif os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):  # people set it where such exchanges go wrong
        problem = "NCCL_P2P_DISABLE is set"
    else:
        try:
            addresses[rank], handle = cuda_all_reduce.share_memory()
        except RuntimeError as error:
            problem = str(error)
    told = exchange(bytes([not problem]) + machine[:36].ljust(36) + handle)
    if not problem and not all(each[0] for each in told):
        problem = "another rank cannot"
    elif not problem and len({each[1:37] for each in told}) > 1:
        problem = "the ranks are on several machines"
    if not problem:
        try:
            for other, each in enumerate(told):
                if other != rank:
                    addresses[other] = cuda_all_reduce.open_memory(each[37:])
        except RuntimeError as error:
            problem = str(error)
    if not all_can(not problem):
        logger.info("small sums over ranks are left to NCCL: %s", problem or "another rank cannot")
        _close(rank, addresses)
        return None
    shared = SharedMemory(rank, [addresses[each] for each in range(size)], device)
    if not all_can(shared.adds_up(device)):
        logger.warning(
            "small sums over ranks are left to NCCL: the GPUs open one another's memory, but sums through it are wrong "
            "or do not end. Is PCIe traffic between them redirected, by an IOMMU or by ACS?"
        )
        return None
    return shared


def _close_later(rank: int, addresses: list[int], device: torch.device, process: int) -> None:
    """Let go of the memory. Python's collector calls this in any thread, also in one that captures a graph of another
    engine, which CUDA would give up if memory was freed then: the next call does it."""
    if os.getpid() != process:  # a fork, in which CUDA cannot be used
        return
    _unclosed.append((rank, addresses, device))
    if not torch.cuda.is_current_stream_capturing():
        _close_the_unclosed()


def _close_the_unclosed() -> None:
    while _unclosed:
        try:
            rank, addresses, device = _unclosed.pop()
        except IndexError:  # another thread was faster
            return
        with torch.cuda.device(device):  # this thread's may be another one
            _close(rank, dict(enumerate(addresses)))


def _close(rank: int, addresses: dict[int, int]) -> None:
    for other, address in addresses.items():
        cuda_all_reduce.close_memory(address, other == rank)
