from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.blend.plan import Segment, make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.chunks.retention import RetentionKey
from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.prefix_cache import find_prefix
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.core.step import ScheduledRequest, SchedulerOutput, blend_rows
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.owners import Owner
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request, RequestStatus
from vllm_blend.sampling_params import SamplingParams

SIZE = 2
MAX_LEN = 24


@dataclass(frozen=True)
class Arrival:
    """A request as a test draws it."""

    step: int
    prompt: list[int]
    new_tokens: int  # 0: only the prompt's KV is wanted
    kind: str  # "plain", "blend"
    blocked_until: int = 0
    abort_at: int | None = None
    priority: int = 0
    flow: tuple[str, str] = ("", "")  # tenant and call


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN - 6))
    blend = len(prompt) > 2 and draw(st.booleans())
    return Arrival(
        step=draw(st.integers(0, 12)),
        prompt=prompt,
        new_tokens=draw(st.integers(0, 5)),
        kind="blend" if blend else "plain",
        blocked_until=draw(st.sampled_from([0, 0, 0, 8, 15])),
        abort_at=draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 20))),
        priority=draw(st.integers(-1, 1)),
        flow=draw(st.sampled_from([("", ""), ("a", "1"), ("a", "2"), ("b", "1")])),
    )


def request_of(index: int, arrival: Arrival) -> Request:
    plan = None
    if arrival.kind == "blend":
        n = len(arrival.prompt) - 2
        stored = torch.zeros(3, n - n // 2, 1, 1)  # the first half has no stored KV: holes
        segments = [Segment(n // 2, ChunkKV(stored, stored))]
        selector = make_selector(["value_deviation", "first_tokens"][index % 2])
        plan = make_plan(segments, arrival.prompt, n, selector, 0.5, [1], None, 3)
    params = SamplingParams(max_tokens=arrival.new_tokens) if arrival.new_tokens else None
    metrics = RequestMetrics(arrival_time=0.0)
    request = Request(str(index), list(arrival.prompt), params, metrics, blend=plan, priority=arrival.priority)
    tenant, request.call = arrival.flow
    request.owner = Owner(tenant)
    return request


@dataclass
class Simulation:
    """Drives a scheduler as the engine does, with a cache that remembers what was written to every slot."""

    scheduler: Scheduler
    written: dict[int, object] = field(default_factory=dict)  # slot -> the tokens up to it, or whose blend it is

    def step(self) -> set[Request]:
        """One step; returns the requests that made progress."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        queue = [request for request in scheduler.waiting if not request.blocked]
        was_running = list(scheduler.running)
        output = scheduler.schedule()
        assert bool(output) == bool(output.scheduled)
        self.check_tables()
        scheduled = [item.request for item in output.scheduled]
        if not scheduler.waiting.is_contended:  # otherwise calls take turns
            self.check_admission(queue, was_running, scheduled)
        assert not output.preempted or set(scheduled).isdisjoint([*queue, *output.preempted]), (
            "a step that preempts admits nothing"
        )
        for request in output.preempted:
            kept = [other.priority for other in scheduler.running]
            assert max(kept, default=request.priority) <= request.priority, "a higher number kept its pages"
        self.check_budget(output.scheduled)
        for item in output.scheduled:
            self.read_and_write(item)
        scheduler.advance(output)
        for item in output.scheduled:
            request = item.request
            if not item.completes:
                assert item.part is not None and request.num_blended_rows == item.part.stop
                assert request.num_computed_tokens == 0 and not item.samples
                continue
            assert request.num_computed_tokens == item.stop
            assert len(request.block_table) >= blocks.blocks_for(item.stop)
            assert item.samples == (request.params is not None and item.stop == request.num_tokens)
            if item.samples:
                request.output_token_ids.append(len(request.output_token_ids) % 2)
            wanted = 0 if request.params is None else request.params.max_tokens or 0
            if item.stop >= request.num_prompt_tokens and len(request.output_token_ids) == wanted:
                request.finish("length")
                scheduler.finish(request)
        return {item.request for item in output.scheduled}

    def check_tables(self) -> None:
        """Blocks are free, or held; a block that two requests hold stands for the same tokens in both."""
        blocks = self.scheduler.blocks
        owners: dict[int, set[tuple[int, ...]]] = {}
        for request in self.scheduler.running:
            assert len(set(request.block_table)) == len(request.block_table)
            for index, block in enumerate(request.block_table):
                prefix = tuple(request.token_slice(0, (index + 1) * blocks.block_size))
                owners.setdefault(block, set()).add(prefix)
        assert 0 not in owners
        assert all(len(prefixes) == 1 for prefixes in owners.values())
        assert blocks.num_free_blocks == blocks.num_usable_blocks - len(owners)
        for request in self.scheduler.waiting:
            assert request.block_table == []

    def check_admission(self, queue: list[Request], was_running: list[Request], scheduled: list[Request]) -> None:
        admitted = [request for request in scheduled if request not in was_running]
        in_order = sorted(queue, key=lambda request: request.priority)
        assert sorted(admitted, key=in_order.index) == in_order[: len(admitted)], (
            "only blocked requests are passed over"
        )
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs
        if queue or was_running:
            assert scheduled, "a request could run, but none does"

    def check_budget(self, scheduled: list[ScheduledRequest]) -> None:
        if sum(item.num_rows for item in scheduled) > self.scheduler.max_num_batched_tokens:
            *others, last = scheduled
            assert last.is_blend and last.part is None
            if last.request.params is not None and last.request.blend is not None and last.request.blend.is_divisible:
                assert last.num_rows <= self.scheduler.max_num_batched_tokens, "it fits a step of its own"
            assert all(item.num_tokens == 1 for item in others), "beside a blend above the budget only decodes run"

    def read_and_write(self, item: ScheduledRequest) -> None:
        """A step reads every position before its own, and must find there what this very request needs."""
        request, size = item.request, self.scheduler.blocks.block_size
        slots = [request.block_table[p // size] * size + p % size for p in range(item.stop)]
        content: list[object] = [
            tuple(request.token_slice(0, p + 1)) if request.exact else (request.request_id, p) for p in range(item.stop)
        ]
        assert item.is_blend == (request.blend is not None and item.start == 0)
        for slot, expected in list(zip(slots, content, strict=True))[: item.start]:
            assert self.written[slot] == expected
        if item.is_blend and not item.starts_blend:  # what earlier parts computed, and put in place, is still there
            assert [self.written[slot] for slot in slots] == content
        for slot, value in list(zip(slots, content, strict=True))[item.start :]:
            others = [other for other in self.scheduler.running if other is not request]
            assert not any(slot // size in other.block_table for other in others), "wrote to a shared block"
            self.written[slot] = value


def rows_of(request: Request, blocks: BlockManager) -> int:
    """Return how many tokens of a waiting request are in no page."""
    if request.blend is not None:
        return blend_rows(request)
    return request.num_tokens - len(find_prefix(blocks, request)) * blocks.block_size


def is_full(scheduler: Scheduler) -> bool:
    """Return whether the requests that wait and are not blocked fill a step, or take all room that is left."""
    ready = [request for request in scheduler.waiting if not request.blocked]
    rows = sum(rows_of(each, scheduler.blocks) for each in ready)
    room = scheduler.max_num_seqs - len(scheduler.running)
    fills = len(ready) >= room or rows + len(scheduler.running) >= scheduler.max_num_batched_tokens
    return bool(ready) and room > 0 and fills


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(arrivals(), min_size=1, max_size=12),
    spare_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 30),
    caching=st.booleans(),
    several=st.booleans(),
)
def test_random_traffic(
    plan: list[Arrival], spare_blocks: int, max_num_seqs: int, budget: int, caching: bool, several: bool
) -> None:
    """Arrivals, aborts, late chunks and pools of barely one request: every request finishes, nothing leaks."""
    blocks = BlockManager(MAX_LEN // SIZE + 1 + spare_blocks, SIZE, caching)
    scheduler = Scheduler(blocks, max_num_seqs, budget)
    simulation = Simulation(scheduler)
    plan = plan if several else [replace(each, flow=("", "")) for each in plan]
    requests = {request_of(index, arrival): arrival for index, arrival in enumerate(plan)}
    for step in range(2000):
        unblocks = any(0 < arrival.blocked_until == step for arrival in plan)
        for request, arrival in requests.items():
            if arrival.step == step:
                request.blocked = step < arrival.blocked_until
                scheduler.add(request)
                assert unblocks or scheduler.has_full_step == is_full(scheduler)
            if arrival.blocked_until == step:
                request.blocked = False
            if arrival.abort_at is not None and arrival.abort_at + arrival.step == step and not request.finished:
                request.finish("abort")
                scheduler.finish(request)
        simulation.step()
        if all(request.finished for request in requests):
            break
    assert all(request.finished for request in requests)
    assert not scheduler.has_requests and not scheduler.waiting.tenants
    assert blocks.num_free_blocks == blocks.num_usable_blocks
    for request, arrival in requests.items():
        assert request.block_table == []
        if request.finish_reason != "abort":
            assert len(request.output_token_ids) == arrival.new_tokens


def drain(simulation: Simulation) -> None:
    while simulation.scheduler.has_requests:
        simulation.step()


def test_pages_run_out_and_the_youngest_starts_over() -> None:
    blocks = BlockManager(MAX_LEN // SIZE + 1, SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(blocks, 4, 64)
    old, young = (request_of(i, Arrival(0, [i] * 10, 10, "plain")) for i in range(2))
    scheduler.add(old)
    scheduler.add(young)
    simulation = Simulation(scheduler)
    while not scheduler.num_preemptions:
        simulation.step()
    assert scheduler.running == [old]
    assert list(scheduler.waiting) == [young]
    assert young.status is RequestStatus.PREEMPTED
    assert young.num_computed_tokens == 0
    drain(simulation)
    assert len(old.output_token_ids) == len(young.output_token_ids) == 10
    assert blocks.num_free_blocks == blocks.num_usable_blocks


def test_a_prefix_in_the_cache_is_not_scheduled_again() -> None:
    blocks = BlockManager(40, SIZE)
    scheduler = Scheduler(blocks, 4, 64)
    prompt = [0, 1, 1, 0, 1, 0, 0]
    scheduler.add(request_of(0, Arrival(0, prompt, 2, "plain")))
    drain(Simulation(scheduler))
    again = request_of(1, Arrival(0, [*prompt[:6], 1, 1], 2, "plain"))
    scheduler.add(again)
    [item] = scheduler.schedule().scheduled
    assert (item.start, item.num_tokens) == (6, 2)
    assert again.num_cached_tokens == 6


def test_the_last_token_is_computed_whatever_is_cached() -> None:
    blocks = BlockManager(40, SIZE)
    scheduler = Scheduler(blocks, 4, 64)
    prompt = [0, 1, 1, 0]
    simulation = Simulation(scheduler)
    for index in range(2):
        request = request_of(index, Arrival(0, prompt, 1, "plain"))
        scheduler.add(request)
        drain(simulation)
    assert request.num_cached_tokens == 2


def test_a_blended_request_neither_reads_nor_feeds_the_prefix_cache() -> None:
    blocks = BlockManager(40, SIZE)
    scheduler = Scheduler(blocks, 4, 64)
    prompt = [0, 1, 1, 0, 1, 0, 0, 1]
    simulation = Simulation(scheduler)
    for index, kind in enumerate(["blend", "plain", "blend"]):
        request = request_of(index, Arrival(0, prompt, 2, kind))
        scheduler.add(request)
        drain(simulation)
        assert request.num_cached_tokens == 0


def test_requests_wait_for_a_free_sequence() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 2, 64)
    for index in range(3):
        scheduler.add(request_of(index, Arrival(0, [index] * 4, 3, "plain")))
    assert [item.request.request_id for item in scheduler.schedule().scheduled] == ["0", "1"]
    assert [request.request_id for request in scheduler.waiting] == ["2"]


def test_a_lower_priority_number_goes_first_and_takes_no_running_requests_place() -> None:
    scheduler = Scheduler(BlockManager(60, SIZE), 2, 64)
    for index, priority in enumerate([5, 0, 3, 0, -1]):
        scheduler.add(request_of(index, Arrival(0, [index] * 4, 3, "plain", priority=priority)))
    assert [item.request.request_id for item in scheduler.schedule().scheduled] == ["4", "1"]
    scheduler.add(request_of(5, Arrival(0, [0] * 4, 3, "plain", priority=-2)))
    assert [request.request_id for request in scheduler.running] == ["4", "1"]
    assert [request.request_id for request in scheduler.waiting] == ["5", "3", "2", "0"]


def test_who_was_preempted_waits_before_all_others_of_its_priority() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), max_num_seqs=1, max_num_batched_tokens=8)
    for index, priority in enumerate([1, 0, 1, 2]):
        scheduler.add(request_of(index, Arrival(0, [index] * 4, 3, "plain", priority=priority)))
    scheduler.schedule()
    scheduler.preempt_last()
    assert [request.request_id for request in scheduler.waiting] == ["1", "0", "2", "3"]
    scheduler.add_first(request_of(4, Arrival(0, [4] * 4, 3, "plain", priority=1)))
    assert [request.request_id for request in scheduler.waiting] == ["1", "4", "0", "2", "3"]


def test_a_priority_may_change_while_a_request_waits_or_runs() -> None:
    scheduler = Scheduler(BlockManager(60, SIZE), 3, 64)
    requests = [request_of(i, Arrival(0, [i] * 4, 3, "plain", priority=p)) for i, p in enumerate([1, 2, 3, 4, 5, 6])]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    scheduler.prioritize(requests[2], 1)
    assert scheduler.running == [requests[0], requests[2], requests[1]]
    scheduler.prioritize(requests[5], 4)
    assert list(scheduler.waiting) == [requests[5], requests[3], requests[4]]
    queued_by_no_one = request_of(6, Arrival(0, [6], 1, "plain"))
    scheduler.prioritize(queued_by_no_one, -1)
    assert queued_by_no_one.priority == -1 and queued_by_no_one not in [*scheduler.running, *scheduler.waiting]


def test_long_prompts_are_computed_in_pieces_beside_decodes() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 6)
    simulation = Simulation(scheduler)
    short, long = request_of(0, Arrival(0, [0, 1], 5, "plain")), request_of(1, Arrival(0, [1] * 14, 1, "plain"))
    scheduler.add(short)
    scheduler.add(long)
    starts = []
    while not long.finished:
        simulation.step()
        starts.append((len(short.output_token_ids), long.num_computed_tokens))
    assert starts == [(1, 4), (2, 9), (3, 0)]


def test_a_step_that_preempts_admits_nothing() -> None:
    """The pages that a request gives back are for those that run, although its own first tokens would fit again."""
    scheduler = Scheduler(BlockManager(13, SIZE), 4, 4)
    requests = [request_of(i, Arrival(0, [i] * 8, 5, "plain")) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    simulation, scheduled = Simulation(scheduler), set[Request]()
    while not scheduler.num_preemptions:
        scheduled = simulation.step()
    assert scheduled == set(requests[:2]) and list(scheduler.waiting) == requests[2:]


def test_a_preempted_request_that_finds_its_own_blocks_has_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(BlockManager(7, SIZE), 4, 4)
    old, young = (request_of(i, Arrival(0, [i] * 6, 5, "plain")) for i in range(2))
    scheduler.add(old)
    scheduler.add(young)
    simulation = Simulation(scheduler)
    while not scheduler.num_preemptions:
        simulation.step()
    outputs: list[SchedulerOutput] = []
    schedule = scheduler.schedule

    def noted(ahead: bool = False) -> SchedulerOutput:
        outputs.append(schedule(ahead))
        return outputs[-1]

    monkeypatch.setattr(scheduler, "schedule", noted)
    drain(simulation)
    again = next(item for output in outputs for item in output.scheduled if item.request is young)
    assert again.start > 0 == young.num_cached_tokens


def test_a_preempted_blend_that_finds_its_own_context_has_no_hit() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), 4, 64)
    request = request_of(0, Arrival(0, [0, 1, 1, 0, 1, 0, 0, 1], 5, "blend"))
    request.retention = RetentionKey(b"context", 6)
    scheduler.add(request)
    scheduler.advance(scheduler.schedule())
    scheduler.preempt_last()
    [item] = scheduler.schedule().scheduled
    assert not item.is_blend and item.start == 6, "its context is in the pages that it has retained"
    assert request.num_cached_tokens == 0


def test_a_blend_whose_context_is_retained_counts_as_its_question() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), max_num_seqs=4, max_num_batched_tokens=8)
    for index in range(3):
        request = request_of(index, Arrival(0, [0, 1, 1, 0, 1, 0, 0, 1], 1, "blend"))
        request.retention = RetentionKey(b"context", 6)
        scheduler.add(request)
        if index == 0:
            assert scheduler.has_full_step, "nothing is retained yet"
            scheduler.advance(scheduler.schedule())
    assert not scheduler.has_full_step, "two questions of two tokens are left, and one that runs"


def test_what_has_been_counted_is_forgotten_when_the_queue_changes_elsewhere() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), max_num_seqs=4, max_num_batched_tokens=8)
    first, second, third = (request_of(index, Arrival(0, [0, 1, 1, index], 1, "plain")) for index in range(3))
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.has_full_step
    scheduler.finish(first)
    assert not scheduler.has_full_step
    third.blocked = True
    scheduler.add_first(third)  # before those that are counted
    assert not scheduler.has_full_step
    scheduler.add(request_of(3, Arrival(0, [0, 1, 1, 0], 1, "plain")))
    assert scheduler.has_full_step


def test_no_step_is_full_without_room_or_requests() -> None:
    scheduler = Scheduler(BlockManager(40, SIZE), max_num_seqs=1, max_num_batched_tokens=8)
    scheduler.add(request_of(0, Arrival(0, [0, 1], 1, "plain")))
    assert scheduler.has_full_step
    scheduler.schedule()
    assert not scheduler.has_full_step
    scheduler.add(request_of(1, Arrival(0, [0, 1], 1, "plain")))
    assert not scheduler.has_full_step, "no other request may run"
