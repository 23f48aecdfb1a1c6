"""Which ranks share memory: all of them or none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import CPU, on_ranks
from vllm_blend.distributed import shared_memory
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.ops import cuda_all_reduce

SIZE = 3
here = threading.local()  # `rank`, in the thread of a rank


class Driver:
    """Stands for the CUDA driver: a rank's memory is at 100 for itself, and at 200 + rank for the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, without_kernels: int = -1, unreachable: int = -1) -> None:
        self.closed: list[tuple[int, int, bool]] = []  # rank, address, whether it is the rank's own
        self._unreachable = unreachable
        monkeypatch.setattr(cuda_all_reduce, "is_available", lambda: here.rank != without_kernels)
        for name in ("share_memory", "open_memory", "close_memory"):
            monkeypatch.setattr(cuda_all_reduce, name, getattr(self, name))
        monkeypatch.setattr(shared_memory, "SharedMemory", lambda rank, addresses, _: (rank, addresses))

    def share_memory(self) -> tuple[int, bytes]:
        return 100, bytes([here.rank]) * cuda_all_reduce.HANDLE_BYTES

    def open_memory(self, handle: bytes) -> int:
        assert len(handle) == cuda_all_reduce.HANDLE_BYTES and len(set(handle)) == 1
        if self._unreachable in (handle[0], here.rank):
            raise RuntimeError("open_memory: CUDA error 217")
        return 200 + handle[0]

    def close_memory(self, address: int, is_own: bool) -> None:
        self.closed.append((here.rank, address, is_own))


def shared(ranks: Ranks) -> Any:
    here.rank = ranks.rank
    return shared_memory.share_memory(ranks.rank, ranks.size, ranks.gather_all, CPU)


def test_each_rank_sees_all_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    assert on_ranks(SIZE, shared) == [(0, [100, 201, 202]), (1, [200, 100, 202]), (2, [200, 201, 100])]
    assert driver.closed == []


def test_one_rank_without_kernels_leaves_all_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, without_kernels=1)
    assert on_ranks(SIZE, shared) == [None] * SIZE
    assert sorted(driver.closed) == [(0, 100, True), (2, 100, True)]


def test_one_gpu_out_of_reach_leaves_all_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, unreachable=2)
    assert on_ranks(SIZE, shared) == [None] * SIZE
    opened = [(0, 201, False), (1, 200, False)]  # before the attempt that failed
    assert sorted(driver.closed) == sorted([(rank, 100, True) for rank in range(SIZE)] + opened)


def test_ranks_of_several_machines_leave_all_to_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Driver(monkeypatch)

    class Machine:
        def exists(self) -> bool:
            return True

        def read_text(self) -> str:
            return f"machine {here.rank // 2}\n"

    monkeypatch.setattr(shared_memory, "_MACHINE", Machine())
    assert on_ranks(SIZE, shared) == [None] * SIZE
