"""Either all ranks share memory or none does. A stand-in replaces the kernel that adds up."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, call

import pytest
import torch

from tests.distributed.ranks import CPU, on_ranks
from vllm_blend.distributed import shared_memory
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.distributed.shared_memory import SharedMemory
from vllm_blend.ops import cuda_all_reduce, cuda_library
from vllm_blend.ops.cuda_all_reduce import MAX_BYTES

SIZE = 3
here = threading.local()  # `rank`, in the thread of a rank


class Driver:
    """Stands for the CUDA driver: a rank's memory is at 100 for itself, and at 200 + rank for the others."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, without_kernels: int = -1, unreachable: int = -1, wrong: int = -1
    ) -> None:
        self.closed: list[tuple[int, int, bool]] = []  # rank, address, whether it is the rank's own
        self._unreachable = unreachable
        monkeypatch.setattr(cuda_library, "is_available", lambda: here.rank != without_kernels)
        for name in ("share_memory", "open_memory", "close_memory"):
            monkeypatch.setattr(cuda_all_reduce, name, getattr(self, name))

        class Memory(NamedTuple):  # which is not closed with its last reference
            rank: int
            addresses: list[int]
            device: torch.device

            def adds_up(self, device: torch.device) -> bool:
                return self.rank != wrong

        monkeypatch.setattr(shared_memory, "SharedMemory", Memory)

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
    found = [each[:2] for each in on_ranks(SIZE, shared)]
    assert found == [(0, [100, 201, 202]), (1, [200, 100, 202]), (2, [200, 201, 100])]
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


def test_who_keeps_nccl_from_other_gpus_memory_keeps_us_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert on_ranks(SIZE, shared) == [None] * SIZE and driver.closed == []
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert None not in on_ranks(SIZE, shared)


def test_wrong_sums_on_one_rank_leave_all_to_nccl(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Driver(monkeypatch, wrong=2)
    assert on_ranks(SIZE, shared) == [None] * SIZE
    assert "sums through it are wrong" in caplog.text


class Trial:
    """The first sums. `received` says of a rank and a call whether the others' parts arrive; if not, it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, received: Callable[[int, int], bool]) -> None:
        self.abandoned: list[int] = []
        self._received, self._calls = received, [0] * SIZE
        monkeypatch.setattr(cuda_all_reduce, "MAX_BYTES", 4096)
        monkeypatch.setattr(cuda_all_reduce, "all_reduce", self.all_reduce)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self)

    def run(self, ranks: Ranks) -> bool:
        here.ranks, here.waits = ranks, False
        memory = SharedMemory(ranks.rank, [100] * SIZE, CPU)
        try:
            return memory.adds_up(CPU)
        finally:
            if memory._has_ended[0]:
                self.abandoned.append(ranks.rank)

    def record_event(self) -> Trial:
        return self

    def query(self) -> bool:
        return not here.waits

    def all_reduce(self, data: torch.Tensor, memories: torch.Tensor, rank: int, has_ended: torch.Tensor) -> None:
        assert data.numel() * data.element_size() * (SIZE - 1) <= cuda_all_reduce.MAX_BYTES
        self._calls[rank] += 1
        total = torch.stack(here.ranks.gather_all(data)).sum(0)
        if self._received(rank, self._calls[rank]):
            data.copy_(total)
        else:
            here.waits = True


def test_the_first_sums_are_right(monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]) -> None:
    trial = Trial(monkeypatch, lambda rank, call: True)
    assert on_ranks(SIZE, trial.run) == [True] * SIZE
    assert trial.abandoned == []


@pytest.mark.parametrize("lost", [1, 2, 3])  # the second goes through the other half of the memory
def test_a_rank_that_receives_nothing_ends_its_first_sums(
    lost: int, monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]
) -> None:
    monkeypatch.setattr(shared_memory, "TRIAL_SECONDS", 0.0)
    trial = Trial(monkeypatch, lambda rank, call: rank != 1 or call != lost)
    assert on_ranks(SIZE, trial.run) == [True, False, True]
    assert trial.abandoned == [1]


def test_first_sums_that_are_cut_off_are_abandoned(
    monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]
) -> None:
    trial = Trial(monkeypatch, lambda rank, call: False)
    monkeypatch.setattr(trial, "query", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        on_ranks(SIZE, trial.run)
    assert sorted(trial.abandoned) == [0, 1, 2]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_first_sums_that_end_wrong_are_noticed(
    lost: int, monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]
) -> None:
    trial = Trial(monkeypatch, lambda rank, call: rank != 1 or call != lost)
    monkeypatch.setattr(trial, "query", lambda: True)
    assert on_ranks(SIZE, trial.run) == [True, False, True]


@pytest.mark.parametrize("of", range(SIZE))
def test_first_sums_notice_what_lay_there_before(
    of: int, monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]
) -> None:
    """Rank 1 has a rank's part of two calls ago in a cache."""
    trial, seen = Trial(monkeypatch, lambda rank, call: True), []

    def all_reduce(data: torch.Tensor, memories: torch.Tensor, rank: int, has_ended: torch.Tensor) -> None:
        parts = here.ranks.gather_all(data)
        if rank == 1:
            seen.append(parts[of].clone())
            parts[of] = seen[-3] if len(seen) > 2 else seen[-1]
        data.copy_(torch.stack(parts).sum(0))

    monkeypatch.setattr(cuda_all_reduce, "all_reduce", all_reduce)
    assert on_ranks(SIZE, trial.run) == [True, False, True]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """Give a list that fills with the memory that is closed: its address, and whether it is the rank's own."""
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_all_reduce, "close_memory", lambda address, is_own: seen.append((address, is_own)))
    yield seen
    gc.collect()  # an error holds memory until then


def doubled(data: torch.Tensor, memories: torch.Tensor, rank: int, has_ended: torch.Tensor) -> None:
    """Stand for the kernel, between two ranks whose parts are alike."""
    assert data.is_contiguous() and data.data_ptr() % 16 == 0 and memories.device == has_ended.device == CPU
    data.mul_(2)


def test_a_part_is_summed_wherever_it_lies(monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]) -> None:
    monkeypatch.setattr(cuda_all_reduce, "all_reduce", doubled)
    shared = SharedMemory(0, [100, 201], CPU)
    whole = torch.arange(81.0)
    for part in (whole[:64], whole[1:65], whole[:80].view(8, 10).t(), whole[1:81].view(8, 10)[:, :4]):
        expected = part * 2
        assert torch.equal(shared.sum(part), expected)
    assert shared.sum(whole[:0]).shape == (0,)


def test_ranks_choose_by_what_is_alike_on_all_of_them(closed: list[tuple[int, bool]]) -> None:
    """Not by the alignment of a part, say: one rank would leave the sum to NCCL, and the other would not."""
    shared = SharedMemory(0, [100, 201], CPU)

    def accepts(part: torch.Tensor) -> bool:
        return shared.accepts(Mock(wraps=part, is_cuda=True, dtype=part.dtype))

    whole = torch.zeros(MAX_BYTES // 4 + 4)
    assert accepts(whole[:8]) and accepts(whole[1:9]) and accepts(whole[:32].view(4, 8).t()) and accepts(whole[:0])
    assert accepts(whole[:-4]) and not accepts(whole) and not accepts(whole[:7])
    assert not accepts(whole[:8].double()) and not shared.accepts(whole[:8])
    shared = SharedMemory(0, [100, 201, 202], CPU)  # of whose parts each rank reads two
    assert accepts(whole[: MAX_BYTES // 8]) and not accepts(whole[: MAX_BYTES // 8 + 4])


def test_memory_is_closed_with_its_ranks_and_not_in_a_fork(
    monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]
) -> None:
    shared = SharedMemory(1, [200, 100, 202], CPU)
    del shared
    gc.collect()
    assert closed == [(200, False), (100, True), (202, False)]
    shared = SharedMemory(1, [200, 100, 202], CPU)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del shared
    gc.collect()
    assert len(closed) == 3


def test_memory_that_is_dropped_while_a_graph_is_captured_is_closed_later(
    monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, bool]]
) -> None:
    """CUDA gives up a capture whose thread frees memory, and Python's collector may run at any time."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    SharedMemory(0, [100, 201], CPU)
    gc.collect()
    assert closed == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    SharedMemory(1, [202, 101], CPU)
    gc.collect()
    assert sorted(closed) == [(100, True), (101, True), (201, False), (202, False)]


@pytest.mark.parametrize("made_within", [True, False])
def test_sums_are_abandoned_wherever_the_engine_was_made(made_within: bool, closed: list[tuple[int, bool]]) -> None:
    """The threads that leave are not in the mode of the one that made the engine."""
    with torch.inference_mode(made_within):
        shared = SharedMemory(0, [100, 201], CPU)
    shared.abandon()
    assert shared._has_ended.tolist() == [1]


class Leaving:
    """Two ranks as one of them sees them, on a device that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.both = Mock()
        self.group, self.memory = self.both.group, self.both.memory
        monkeypatch.setattr(Ranks, "waits_on_device", True)
        monkeypatch.setattr("vllm_blend.distributed.ranks.share_memory", self.share)
        self.ranks = Ranks(0, 2, self.group)
        self.leaves_early = False

    def share(self, *_: Any) -> Any:
        if self.leaves_early:
            self.ranks.leave()
        return self.memory


def test_who_leaves_twice_abandons_and_aborts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order: NCCL may wait for what is queued."""
    case = Leaving(monkeypatch)
    case.ranks.share_memory(CPU)
    case.ranks.leave()
    case.ranks.leave()
    assert case.both.mock_calls == [call.memory.abandon(), call.group.abort()]


def test_a_rank_that_has_left_while_memory_was_shared_waits_for_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches the other ranks may see one of them end in the meantime."""
    case = Leaving(monkeypatch)
    case.leaves_early = True
    case.ranks.share_memory(CPU)
    assert case.memory.abandon.call_count == 1
