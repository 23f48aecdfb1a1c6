"""The CUDA kernel that adds up small tensors over the GPUs of a machine (csrc/cuda/all_reduce.cu), and the memory that
its ranks share.

The rules of `ops.cuda_library` hold, but that memory is shared and closed before and after all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Int, Int64, Stream
from vllm_blend.ops.cuda_library import DTYPES, bound, check, stream_of

HANDLE_BYTES = 64  # VB_HANDLE_BYTES
MAX_RANKS = 8  # VB_MAX_RANKS
MAX_BYTES = 4 << 20  # VB_ALL_REDUCE_BYTES
SUM_DTYPES = DTYPES | {torch.float32: 2}  # VB_FP32


# fmt: off
class AllReduceFunctions(Protocol):
    def share_memory(self, address: to.Address, handle: to.Handle, /) -> Int: ...

    def open_memory(self, address: to.Address, handle: to.Handle, /) -> Int: ...

    def close_memory(self, address: Int64, is_own: Int, /) -> Int: ...

    def all_reduce(
        self, data: to.Out, bytes: Int64, memories: to.Memories, rank: Int, ranks: Int,
        has_ended: to.Ended, dtype: Int, stream: Stream, /,
    ) -> Int: ...
# fmt: on


functions: Callable[[], AllReduceFunctions] = bound(AllReduceFunctions)


def share_memory() -> tuple[int, bytes]:
    """Return the address of new memory on the current device, and a handle with which another process of this machine
    opens it. Raises RuntimeError."""
    address = torch.zeros(1, dtype=torch.int64, device="cpu")  # whatever the program's default device is
    handle = torch.zeros(HANDLE_BYTES, dtype=torch.uint8, device="cpu")
    check("share_memory", functions().share_memory(to.Address(address), to.Handle(handle)))
    return int(address), handle.numpy().tobytes()


def open_memory(handle: bytes) -> int:
    """Return the address at which the current device reads and writes another process's memory. Raises RuntimeError if
    it cannot."""
    address = torch.zeros(1, dtype=torch.int64, device="cpu")
    given = torch.frombuffer(bytearray(handle), dtype=torch.uint8)
    check("open_memory", functions().open_memory(to.Address(address), to.Handle(given)))
    return int(address)


def close_memory(address: int, is_own: bool) -> None:
    """Free memory that this process has shared, or let go of another's."""
    functions().close_memory(address, is_own)


def all_reduce(data: torch.Tensor, memories: torch.Tensor, rank: int, has_ended: torch.Tensor) -> None:
    """Replace `data`, a contiguous tensor of a multiple of 16 bytes and at most `MAX_BYTES`, by the sum of all ranks'.

    memories [ranks] int64 on the host: where this rank sees all ranks' memory. has_ended [1] int32, pinned: not 0 once
    another rank has ended; this and all later sums are then wrong, and wait for nothing.
    """
    size = data.numel() * data.element_size()
    code = functions().all_reduce(
        to.Out(data), size, to.Memories(memories), rank, len(memories), to.Ended(has_ended),
        SUM_DTYPES[data.dtype], stream_of(data),
    )  # fmt: skip
    check("all_reduce", code)
