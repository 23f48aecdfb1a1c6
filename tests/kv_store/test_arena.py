from __future__ import annotations

import gc
import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_blend.kv_store.host_memory import PAGE, Arena, piece_bytes

PAGES = 16


class Pieces(RuleBasedStateMachine):
    """An arena of 16 pages against a list of the tensors that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(np.zeros(PAGES * PAGE + 100, np.uint8))
        self.alive: list[torch.Tensor] = []
        self.count = 0

    @rule(num_bytes=st.integers(1, PAGES * PAGE + 1))
    def allocate(self, num_bytes: int) -> None:
        free = self.free_ranges()
        piece = self.arena.allocate(num_bytes)
        if piece is None:
            assert piece_bytes(num_bytes) > max(free, default=0)
            return
        assert piece.shape == (num_bytes,)
        self.count += 1
        piece.fill_(self.count % 251)
        self.alive.append(piece)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def keep_only_a_view(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.alive) - 1))
        self.alive[index] = self.alive[index][:1].view(1, 1)[0]

    def ranges(self) -> list[tuple[int, int]]:
        base = self.arena._buffer.ctypes.data
        return sorted((p.data_ptr() - base, piece_bytes(p.untyped_storage().nbytes())) for p in self.alive)

    def free_ranges(self) -> list[int]:
        edges = [0]
        for start, size in self.ranges():
            edges += [start, start + size]
        edges.append(PAGES * PAGE)
        return [stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)]

    @invariant()
    def pieces_are_apart_and_counted(self) -> None:
        ranges = self.ranges()
        assert all(start % PAGE == 0 for start, _ in ranges)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ranges))
        assert self.arena.num_bytes_used == sum(size for _, size in ranges) <= self.arena.num_bytes

    @invariant()
    def only_their_owners_wrote_slots(self) -> None:
        assert all(int(p.min()) == int(p.max()) for p in self.alive)


TestPieces = Pieces.TestCase
TestPieces.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_everything_comes_back_in_one_range() -> None:
    arena = Arena(np.zeros(PAGES * PAGE, np.uint8))
    pieces = [arena.allocate(PAGE) for _ in range(PAGES)]
    assert arena.allocate(1) is None
    for index in (3, 1, 2, 0):
        pieces[index] = None
    assert arena.allocate(4 * PAGE) is not None
    del pieces
    assert arena.allocate(PAGES * PAGE) is not None


def test_a_piece_may_be_dropped_in_another_thread() -> None:
    arena = Arena(np.zeros(PAGE, np.uint8))
    held = [arena.allocate(PAGE)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert arena.num_bytes_used == 0


def test_pieces_outlive_the_arena() -> None:
    arena = Arena(np.full(PAGE, 7, np.uint8))
    piece = arena.allocate(10)
    assert piece is not None
    del arena
    gc.collect()
    assert piece.tolist() == [7] * 10


@pytest.mark.parametrize("num_bytes", [0, 5000])
def test_what_does_not_fit_is_none(num_bytes: int) -> None:
    assert Arena(np.zeros(PAGE, np.uint8)).allocate(num_bytes) is None


def test_a_buffer_below_a_page_holds_nothing() -> None:
    arena = Arena(np.zeros(PAGE - 1, np.uint8))
    assert arena.num_bytes == 0
    assert arena.allocate(1) is None
