"""Moves under budgets: nothing leaks, no block has two owners, and what moved is what was there."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.pages import MISSING
from vllm_blend.features.offload.block_pool import HostBlockPool
from vllm_blend.features.offload.copies import BlockCopies, PlainCopies, ThreadCopies, Ticket
from vllm_blend.features.offload.kv_cache_scheduler import KVCacheScheduler
from vllm_blend.features.offload.planner import MovePlanner, MovePolicy, Plan, Snapshot, plan_all
from vllm_blend.features.offload.residency import Residency

LAYERS, SIZE, HEADS, DIM = 2, 4, 1, 2
BLOCK_BYTES = 2 * LAYERS * SIZE * HEADS * DIM * 4
CHUNKS = [(2, 11), (11, 21), (21, 24), (24, 36)]  # movable blocks: [1], [3, 4], [], [6, 7, 8]
NUM_BLOCKS = 10  # of a request
SECONDS = 120.0  # that no thread here takes, on however slow a machine


def in_thread(policy: MovePolicy) -> MovePlanner:
    return MovePlanner(policy, in_thread=True)


def flush(planner: MovePlanner) -> None:
    """Wait until what the planner has begun is planned."""
    assert not wait(planner._planning, SECONDS).not_done


class LateCopies(BlockCopies):
    """Copies that happen when the test says so, one at a time, in any order."""

    def __init__(self, *sides: object) -> None:
        super().__init__(*sides)  # type: ignore[arg-type]
        self.waiting: list[_Late] = []

    def submit(self, device_blocks: Sequence[int], host_blocks: Sequence[int], to_host: bool) -> _Late:
        ticket = _Late(lambda: self._copy(list(device_blocks), list(host_blocks), to_host))
        self.waiting.append(ticket)
        return ticket

    def finish(self) -> None:
        for ticket in self.waiting:
            ticket.work()
            ticket.over = True
        self.waiting.clear()


class _Late(Ticket):
    def __init__(self, work: Callable[[], None]) -> None:
        self.work, self.over = work, False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        raise AssertionError("nothing waits for a copy while requests run")


class LatePlanner(MovePlanner):
    """Plans when the test says so, and keeps every plan until it is taken, however old."""

    @property
    def plans_at_once(self) -> bool:
        return False

    def __init__(self, policy: MovePolicy) -> None:
        super().__init__(policy)
        self.posted: list[list[Snapshot]] = []
        self.ready: list[Plan] = []

    def post(self, snapshots: Sequence[Snapshot]) -> None:
        self.posted.append(list(snapshots))

    def plan(self, index: int = -1) -> None:
        if self.posted:
            self.ready += plan_all(self.posted[index % len(self.posted)], self.policy)

    def take(self) -> list[Plan]:
        ready, self.ready = self.ready, []
        return ready


class World:
    """Two pools, a scheduler over them, and requests whose every block holds numbers of its own."""

    def __init__(
        self,
        copies: type[BlockCopies] = PlainCopies,
        device_blocks: int = 64,
        host_blocks: int = 64,
        planner: Callable[[MovePolicy], MovePlanner] = MovePlanner,
        **policy: Any,
    ) -> None:
        self.blocks = BlockManager(device_blocks, SIZE)
        shape = (LAYERS, device_blocks, SIZE, HEADS, DIM)
        self.key, self.value = torch.zeros(shape), torch.zeros(shape)
        self.host = HostBlockPool(host_blocks * BLOCK_BYTES, LAYERS, SIZE, HEADS, DIM, torch.float32)
        self.copies: Any = copies(self.key, self.value, self.host)
        settings: dict[str, Any] = {
            "resident_chunks": 1,
            "device_fraction": 0.0,
            "bytes_per_step": 100 * BLOCK_BYTES,
        } | policy
        own = MovePolicy(**settings)
        self.planner: Any = planner(own)
        self.scheduler = KVCacheScheduler(self.blocks, self.host, self.copies, self.planner)
        self.marks: dict[Residency, list[float]] = {}
        self._next = 1.0

    def start(self, chunks: Sequence[tuple[int, int]] = CHUNKS, ranking: Sequence[int] = ()) -> Residency:
        residency = Residency.from_bounds(self.blocks.allocate(NUM_BLOCKS), chunks, ranking, SIZE)
        self.marks[residency] = []
        for block in residency.table:
            self.key[:, block], self.value[:, block] = self._next, -self._next
            self.marks[residency].append(self._next)
            self._next += 1
        self.scheduler.track(residency)
        return residency

    def finish(self, residency: Residency) -> None:
        held = [block for block in residency.table if block != MISSING]
        self.scheduler.forget(residency)
        self.blocks.release(held)
        del self.marks[residency]

    def check(self) -> None:
        """Every block of every request holds its mark, on the side where the tables say it is."""
        for residency, marks in self.marks.items():
            away = {
                index: host for chunk in residency.missing for index, host in zip(chunk.blocks, chunk.host, strict=True)
            }
            for index, (block, mark) in enumerate(zip(residency.table, marks, strict=True)):
                if block == MISSING:
                    k, v = self.host.data[away[index], 0], self.host.data[away[index], 1]
                else:
                    k, v = self.key[:, block], self.value[:, block]
                assert (k == mark).all() and (v == -mark).all()


def moves(scheduler: KVCacheScheduler) -> dict[Residency, tuple[list[int], list[int]]]:
    return {r: (m.promotions, m.evictions) for r, m in scheduler.moved.items()}


def test_the_best_chunks_stay_and_chunks_without_a_whole_block_always_do() -> None:
    world = World()
    one, two = world.start(ranking=[1, 3]), world.start()
    world.scheduler.step({two: [0.1, 0.2, 0.0, 0.7]})
    assert one.resident_chunks == [1, 2] and two.resident_chunks == [2, 3]
    assert world.scheduler.bytes_moved == (1 + 3 + 1 + 2) * BLOCK_BYTES
    assert world.blocks.num_free_blocks == 63 - 20 + 7
    world.check()


def test_a_swap_needs_a_clear_lead_and_a_stay() -> None:
    world = World(margin=0.1, dwell=2)
    request = world.start()
    world.scheduler.step({request: [1.0, 0.5, 0, 0.5]})
    assert request.resident_chunks == [0, 2]
    world.scheduler.step({request: [1.0, 2.0, 0, 0.5]})  # too soon
    world.scheduler.step({request: [1.0, 1.05, 0, 0.5]})  # not better by a tenth
    assert request.resident_chunks == [0, 2]
    world.scheduler.step({request: [1.0, 1.2, 0, 0.5]})
    assert request.resident_chunks == [1, 2]
    assert moves(world.scheduler) == {request: ([1], [0])}
    world.scheduler.step({request: [1.0, 0.0, 0, 0.5]})
    assert request.resident_chunks == [1, 2]  # it has just come
    world.check()


def test_leaving_again_copies_nothing() -> None:
    world = World(dwell=1)
    request = world.start()
    world.scheduler.step({request: [3.0, 2.0, 0, 1.0]})
    world.scheduler.step({request: [1.0, 2.0, 0, 0.0]})
    assert request.resident_chunks == [1, 2] and world.scheduler.bytes_moved == (1 + 2) * BLOCK_BYTES
    world.scheduler.step({request: [3.0, 2.0, 0, 1.0]})
    assert request.resident_chunks == [0, 2]
    assert world.scheduler.bytes_moved == 1 * BLOCK_BYTES  # chunk 0 comes back; chunk 1 has its copy already
    world.check()


def test_a_large_chunk_moves_in_pieces_within_the_budget() -> None:
    world = World(bytes_per_step=2 * BLOCK_BYTES + 5, resident_chunks=0)
    request = world.start([(0, 20)])
    seen = []
    for _ in range(4):
        world.scheduler.step({})
        seen.append((world.scheduler.bytes_moved // BLOCK_BYTES, request.resident_chunks))
    assert seen == [(2, [0]), (2, [0]), (1, []), (0, [])]
    world.check()


def test_without_room_nothing_moves() -> None:
    full = World(host_blocks=1)
    request = full.start([(0, 20)])
    full.scheduler.step({})
    assert request.resident_chunks == [0] and full.scheduler.bytes_moved == 0
    crowded = World(device_blocks=NUM_BLOCKS + 1, dwell=1)
    request = crowded.start()
    crowded.scheduler.step({request: [3.0, 2.0, 0, 1.0]})
    crowded.scheduler.step({request: [1.0, 0.0, 0, 9.0]}, reserve=6)  # 6 blocks are free, the chunk needs 3 of them
    assert request.resident_chunks == [2]  # chunk 0 has left for it
    crowded.scheduler.step({request: [1.0, 0.0, 0, 9.0]}, reserve=1)
    assert request.resident_chunks == [2, 3]
    crowded.check()


def test_copies_of_chunks_that_are_back_make_room_on_the_host() -> None:
    world = World(host_blocks=4, dwell=1)
    request = world.start([(4, 12), (12, 20)])
    world.scheduler.step({request: [1.0, 2.0]})
    world.scheduler.step({request: [2.0, 1.0]})
    world.scheduler.step({request: [1.0, 2.0]})
    assert request.resident_chunks == [1] and world.host.num_free_blocks == 0
    other = world.start([(4, 12), (12, 20)])
    world.scheduler.step({other: [1.0, 2.0]})
    assert other.resident_chunks == [1]
    world.check()


def test_a_move_that_ends_after_its_request_is_dropped() -> None:
    world = World(LateCopies)
    request = world.start()
    world.scheduler.step({})
    assert request.resident_chunks == [0, 1, 2, 3] and len(world.scheduler.moves) == 2
    world.finish(request)
    assert world.host.num_free_blocks < 64  # a copy may still write there
    for ticket in world.copies.waiting:
        ticket.over = True
    world.scheduler.step({})
    assert world.scheduler.num_dropped == 2 and world.scheduler.num_evictions == 0
    assert world.host.num_free_blocks == 64 and world.blocks.num_free_blocks == 63


def test_a_promotion_that_ends_after_its_request_gives_both_sides_back() -> None:
    world = World(LateCopies, dwell=1)
    request = world.start()
    for scores in ([3.0, 2.0, 0, 1.0], [3.0, 2.0, 0, 1.0], [1.0, 2.0, 0, 0.0], [1.0, 2.0, 0, 0.0]):
        world.scheduler.step({request: scores})
        world.copies.finish()
    world.scheduler.step({request: [1.0, 2.0, 0, 0.0]})
    assert request.resident_chunks == [1, 2]
    world.scheduler.step({request: [3.0, 2.0, 0, 0.0]})  # chunk 1 leaves at once, chunk 0 is on its way
    assert request.resident_chunks == [2] and len(world.scheduler.moves) == 1
    world.finish(request)
    assert world.blocks.num_free_blocks == 62 and world.host.num_free_blocks == 63
    world.copies.finish()
    world.scheduler.step({})
    assert world.blocks.num_free_blocks == 63 and world.host.num_free_blocks == 64


def test_copies_in_a_thread_arrive_and_their_errors_are_raised() -> None:
    world = World(ThreadCopies)
    request = world.start()
    deadline = time.monotonic() + SECONDS
    while request.resident_chunks != [0, 2] and time.monotonic() < deadline:
        world.scheduler.step({})
    assert request.resident_chunks == [0, 2]
    world.check()
    broken = world.copies.submit([1], [10**6], True)
    deadline = time.monotonic() + SECONDS
    with pytest.raises(IndexError):
        while time.monotonic() < deadline:
            broken.done()


def test_threads_end_with_their_engine() -> None:
    before = set(threading.enumerate())
    world = World(ThreadCopies, planner=in_thread)
    world.start()
    world.scheduler.step({})
    world.copies.submit([], [], True)
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"offload-copies_0", "offload-planner_0"}
    del world
    gc.collect()
    for thread in started:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_budget_below_a_block_names_the_setting() -> None:
    with pytest.raises(ValueError, match="offload_bytes_per_step"):
        World(bytes_per_step=BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match="dwell"):
        World(dwell=0)


@pytest.mark.parametrize(("count", "wanted"), [(0, 0), (1, 1), (5, 1), (6, 2), (10, 2)])
def test_a_share_of_the_chunks_is_rounded_up(count: int, wanted: int) -> None:
    assert MovePolicy(None, 0.2, 1).target(count) == wanted
    assert MovePolicy(3, 0.2, 1).target(count) == min(3, count)


def test_a_plan_is_begun_a_step_later_and_is_the_same() -> None:
    scores = [3.0, 2.0, 0, 1.0]
    at_once, later = World(), World(planner=in_thread)
    one, other = at_once.start(), later.start()
    at_once.scheduler.step({one: scores})
    later.scheduler.step({other: scores})
    assert one.resident_chunks == [0, 2] and other.resident_chunks == [0, 1, 2, 3]
    flush(later.scheduler.planner)
    later.scheduler.step({other: scores})
    assert other.resident_chunks == [0, 2] and later.scheduler.num_stale_plans == 0
    for _ in range(6):  # a swap: one leaves, then one comes
        flush(later.scheduler.planner)
        later.scheduler.step({other: [1.0, 2.0, 0, 9.0]})
    assert other.resident_chunks == [2, 3]
    later.check()


def test_plans_of_the_past_do_nothing() -> None:
    world = World(LateCopies, planner=LatePlanner)
    request, gone = world.start(), world.start()
    world.scheduler.step({})
    planner = world.planner
    planner.plan()
    world.finish(gone)
    world.scheduler.step({})  # begins to evict chunks 1 and 3 of the first; the second is no more
    assert len(world.scheduler.moves) == 2 and world.scheduler.num_stale_plans == 1
    planner.plan(0)  # the old plan again: it would evict what is on its way
    world.scheduler.step({})
    assert len(world.scheduler.moves) == 2 and world.scheduler.num_stale_plans == 3
    world.copies.finish()
    world.scheduler.step({})
    assert request.resident_chunks == [0, 2] and world.scheduler.num_evictions == 2
    planner.plan(0)
    world.scheduler.step({})
    assert request.resident_chunks == [0, 2] and world.scheduler.num_evictions == 2
    world.check()


def test_the_newest_snapshot_is_planned_and_errors_are_raised_where_plans_are_taken() -> None:
    world = World(planner=in_thread)
    request = world.start()
    for _ in range(50):
        world.scheduler.step({request: [3.0, 2.0, 0, 1.0]})
    flush(world.scheduler.planner)
    world.scheduler.step({request: [3.0, 2.0, 0, 1.0]})
    assert request.resident_chunks == [0, 2] and world.scheduler.num_evictions == 2
    world.scheduler.planner.post([])
    flush(world.scheduler.planner)
    no_view: Any = None
    world.scheduler.planner.post([Snapshot(request, request.version, (no_view,))])
    flush(world.scheduler.planner)
    with pytest.raises(AttributeError):
        world.scheduler.step({})
    world.scheduler.step({})


class Machine(RuleBasedStateMachine):
    """Requests come and go, scores change, plans come late and twice, copies end when they like."""

    @initialize(
        resident=st.integers(0, 3),
        budget=st.integers(1, 6),
        host=st.integers(4, 30),
        device=st.integers(24, 48),
        dwell=st.integers(1, 3),
        planner=st.sampled_from([MovePlanner, LatePlanner]),
    )
    def begin(self, resident: int, budget: int, host: int, device: int, dwell: int, planner: type[MovePlanner]) -> None:
        bytes_per_step = budget * BLOCK_BYTES
        self.world = World(
            LateCopies, device, host, planner, resident_chunks=resident, bytes_per_step=bytes_per_step, dwell=dwell
        )
        self.device, self.num_host = device, host
        self.moved = 0

    @rule()
    def start(self) -> None:
        if self.world.blocks.num_free_blocks >= NUM_BLOCKS:
            self.world.start()

    @rule(index=st.integers(0, 5))
    def finish(self, index: int) -> None:
        if index < len(self.world.marks):
            self.world.finish(list(self.world.marks)[index])

    @rule(seed=st.integers(0, 9), reserve=st.integers(0, 3))
    def step(self, seed: int, reserve: int) -> None:
        random = np.random.default_rng(seed)
        scores = {r: random.random(len(CHUNKS)).tolist() for r in self.world.marks}
        self.world.scheduler.step(scores, reserve)
        assert self.world.scheduler.bytes_moved <= self.world.scheduler.policy.bytes_per_step

    @rule(index=st.integers(-5, -1))
    def plan(self, index: int) -> None:
        if isinstance(self.world.scheduler.planner, LatePlanner):
            self.world.scheduler.planner.plan(index)

    @rule()
    def copy_all(self) -> None:
        self.world.copies.finish()

    @rule(index=st.integers(0, 9))
    def copy(self, index: int) -> None:
        waiting = self.world.copies.waiting
        if index < len(waiting):
            ticket = waiting.pop(index)
            ticket.work()
            ticket.over = True

    @invariant()
    def every_block_has_one_owner(self) -> None:
        if not hasattr(self, "world"):
            return
        scheduler, marks = self.world.scheduler, self.world.marks
        on_device = [b for r in marks for b in r.table if b != MISSING]
        on_device += [b for m in scheduler.moves if m.promotes for b in m.device]
        assert len(set(on_device)) == len(on_device) == self.device - 1 - self.world.blocks.num_free_blocks
        on_host = [b for r in marks for c in r.chunks for b in c.host]
        on_host += [b for m in scheduler.moves if m.is_stale or not m.promotes for b in m.host]
        assert len(set(on_host)) == len(on_host) == self.num_host - self.world.host.num_free_blocks
        self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for residency in list(self.world.marks):
            self.world.finish(residency)
        for ticket in self.world.copies.waiting:
            ticket.over = True
        self.world.scheduler.step({})
        assert self.world.blocks.num_free_blocks == self.device - 1
        assert self.world.host.num_free_blocks == self.num_host


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


def test_requests_without_news_are_not_planned_again() -> None:
    world = World(planner=LatePlanner)
    request, other = world.start(), world.start()
    scores = {request: [3.0, 2.0, 0, 1.0], other: [1.0, 2.0, 0, 3.0]}
    planner = world.planner
    for _ in range(6):
        world.scheduler.step(scores)
        planner.plan()
    assert request.resident_chunks == [0, 2] and other.resident_chunks == [2, 3]
    planner.posted.clear()
    world.scheduler.step(scores)
    assert planner.posted == [[]]
    world.scheduler.step(scores | {other: [1.0, 9.0, 0, 3.0]})
    [snapshot] = planner.posted[-1]
    assert snapshot.residency is other


def test_what_found_no_room_is_planned_again() -> None:
    world = World(device_blocks=NUM_BLOCKS + 1, planner=LatePlanner, dwell=1)
    request = world.start()
    planner, scheduler = world.planner, world.scheduler
    for scores, reserve in (([3.0, 2.0, 0, 1.0], 0),) * 3 + (([1.0, 0.0, 0, 9.0], 6),) * 6:
        scheduler.step({request: scores}, reserve)
        planner.plan()
    assert request.resident_chunks == [2]  # chunk 0 has left, and 6 free blocks are reserved
    wanted = [1.0, 0.0, 0, 9.0]
    for _ in range(4):
        scheduler.step({request: wanted}, 1)
        planner.plan()
    assert request.resident_chunks == [2, 3]
