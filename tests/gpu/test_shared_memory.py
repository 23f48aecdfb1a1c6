"""Sums over two GPUs through memory that both see, beside sums in float64."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from vllm_blend.distributed.ranks import connect, store_in_folder
from vllm_blend.ops.cuda_all_reduce import MAX_BYTES
from vllm_blend.ops.graph_capture import CUDAGraphs

_mp: Any = mp  # as Any: torch's annotations leave `spawn` out

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

SIZE, CALLS = 2, 400
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = {torch.float32: 2**-22, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def part(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank adds in a call."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(call * SIZE + rank))
    return made.to(dtype)


def shape_of(call: int, dtype: torch.dtype) -> tuple[int, int]:
    """Sizes from 16 bytes to the largest, in an order without pattern; some are left to NCCL."""
    drawn = torch.randint(0, 1 << 30, (2,), generator=torch.Generator().manual_seed(call))
    most = MAX_BYTES // dtype.itemsize // 8
    return 1 + int(drawn[0]) % [1, 3, 64, most // 40, most // 8, most // 7][call % 6], 8 if int(drawn[1]) % 4 else 56


def work(rank: int, folder: str) -> None:
    """Rank by rank: sums of many sizes, alone and from a graph, and what is left when one has ended."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = connect(rank, SIZE, store_in_folder(folder, SIZE), device, [])
    ranks.share_memory(device)
    assert ranks.shares_memory
    for call in range(CALLS):
        dtype = DTYPES[call % 3]
        shape = shape_of(call, dtype)
        found = ranks.sum(part(rank, call, shape, dtype).to(device))
        parts = [part(each, call, shape, dtype).double() for each in range(SIZE)]
        error = (found.cpu().double() - sum(parts)).abs().max()
        bound = float(torch.stack(parts).abs().sum(0).max()) * EPSILON[dtype]
        assert error <= bound, (call, shape, dtype, float(error))
        both = ranks.gather_all(found.flatten().view(torch.uint8))
        assert torch.equal(*both), "the ranks have other bits"
    given = torch.empty(40, 4096, dtype=torch.bfloat16, device=device)
    replay, result = CUDAGraphs(device)(lambda: [ranks.sum(given.clone()) for _ in range(7)][-1])
    for call in range(20):
        given.copy_(part(rank, call, (40, 4096), torch.bfloat16))
        replay()
        torch.cuda.synchronize()
        expected = sum(part(each, call, (40, 4096), torch.bfloat16).double() for each in range(SIZE))
        assert (result.cpu().double() - expected).abs().max() < 0.1
    if rank == 0:  # which the other one leaves alone with a sum
        ranks.sum(given.clone())
    ranks.leave()
    torch.cuda.synchronize()
    Path(folder, f"done-{rank}").touch()


def test_sums_are_right_and_alike() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _mp.spawn(work, (folder,), nprocs=SIZE)
        assert all(Path(folder, f"done-{rank}").exists() for rank in range(SIZE))
