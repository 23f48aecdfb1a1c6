"""The memory of a device: it is measured, shared out to the last block and reported; errors say what to do if it is
short.

`gpu_memory_utilization` is a share of the whole device, so everything on it counts: this engine, other engines, other
processes, the CUDA contexts. What is left of that share after weights, the largest step's activations, CUDA graphs and
stored chunks becomes the KV cache.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

GIB = 2**30
GRANULARITY = 2**21  # bytes in which a CUDA device gives memory away
GRAPHS_REMEDY = "lower gpu_memory_utilization or max_num_seqs, or give enforce_eager=True"


class OutOfDeviceMemory(RuntimeError):
    """Raised if what an engine needs at its start does not fit on its device."""


@dataclass(frozen=True)
class Usage:
    """The bytes of a CUDA device at one moment."""

    total: int
    used: int  # by all processes
    reserved: int  # by torch in this process, for tensors: freed ones are kept for the next
    allocated: int  # of those, what tensors hold

    @classmethod
    def now(cls, device: torch.device) -> Usage:
        free, total = torch.cuda.mem_get_info(device)
        reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return cls(total, total - free, reserved, allocated)

    @classmethod
    def settled(cls, device: torch.device) -> Usage:
        """Return the usage after all that torch can return to the device has been returned."""
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return cls.now(device)

    @property
    def other(self) -> int:
        """Return the bytes used outside torch's tensors: by other processes, CUDA contexts and loaded code."""
        return self.used - self.reserved


@dataclass(frozen=True)
class Share:
    """The parts of a GPU's memory, in bytes."""

    total: int
    utilization: float
    other: int
    weights: int  # and whatever else this process holds in tensors
    activations: int
    graphs: int
    chunk_store: int

    @property
    def budget(self) -> int:
        return int(self.total * self.utilization)

    @property
    def pool(self) -> int:
        """Return the bytes that are left for the KV cache; may be negative."""
        taken = self.other + self.weights + self.activations + self.graphs + self.chunk_store
        return self.budget - taken

    def num_blocks(self, block_bytes: int) -> int:
        """Return the number of blocks that fit, in two tensors (K and V) that each take whole pieces of
        `GRANULARITY`."""
        each = max(0, self.pool) // 2 // GRANULARITY * GRANULARITY
        return each // (block_bytes // 2)

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "activations": self.activations,
            "CUDA graphs": self.graphs,
            "chunk store": self.chunk_store,
            "other": self.other,
        }
        listed = ", ".join(f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in parts.items())
        return f"{self.utilization:g} of {self.total / GIB:.2f} GiB is {self.budget / GIB:.2f}: {listed} GiB"


@dataclass(frozen=True)
class Pool:
    """The KV cache in numbers. One of its blocks is padding, which belongs to no request."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def concurrency(self) -> float:
        """Return the number of requests of the greatest length that fit at once."""
        blocks_each = -(-self.max_model_len // self.block_size)
        return (self.num_blocks - 1) / blocks_each

    def __str__(self) -> str:
        return (
            f"KV cache {self.num_blocks * self.block_bytes / GIB:.2f} GiB: {self.num_blocks} blocks, "
            f"{self.num_tokens} tokens of {self.block_bytes // self.block_size} bytes, {self.concurrency:.1f} requests "
            f"of max_model_len={self.max_model_len} at once"
        )


def measure_tensors(make: Callable[[], object], device: torch.device) -> int:
    """Return the bytes of a CUDA device that torch takes for what `make` returns, which is dropped again. Anything that
    stays behind, like the code that CUDA loads, is there already when it is made the next time."""
    made = make()
    kept = Usage.settled(device).reserved
    del made
    return kept - Usage.settled(device).reserved


@contextmanager
def must_fit(what: str, remedy: str, device: torch.device) -> Iterator[None]:
    """Turn running out of a device's memory into an error that says what did not fit, with numbers, and the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        where = "GPU memory" if device.type == "cuda" else "memory"
        message = f"{what} did not fit into {where}{_numbers(device)}: {remedy} ({_first_sentence(error)})"
        # The frames of the failed call hold what it had allocated: the caller may want to try something smaller.
        traceback.clear_frames(error.__traceback__)
        raise OutOfDeviceMemory(message) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory has run out: torch's allocator and Python have types for that, while CUDA and its libraries
    say it in their messages."""
    text = str(error)
    typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return typed or "out of memory" in text or "ALLOC_FAILED" in text


def _numbers(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    now = Usage.now(device)
    return (
        f" (of {now.total / GIB:.2f} GiB, this process's tensors hold {now.allocated / GIB:.2f} GiB, other processes "
        f"and CUDA itself {now.other / GIB:.2f} GiB)"
    )


def _first_sentence(error: BaseException) -> str:
    return str(error).partition(" GPU ")[0].strip().rstrip(".")
