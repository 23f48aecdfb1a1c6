"""Tenants and their calls take turns: one that asks for much keeps no other waiting for more than some steps."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_scheduler import MAX_LEN, SIZE, Arrival, Simulation, request_of
from vllm_blend.core.block_manager import BlockManager
from vllm_blend.core.fairness import MIN_SHARE, divide_prefill
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.kv_store.owners import Owner
from vllm_blend.request import Request

A, B, SECOND_OF_A = ("a", "1"), ("b", "1"), ("a", "2")


class World:
    """A scheduler with a queue of prompts that share nothing."""

    def __init__(self, num_blocks: int = 200, max_num_seqs: int = 4, budget: int = 64) -> None:
        self.blocks = BlockManager(num_blocks + 1, SIZE, enable_prefix_caching=False)
        self.scheduler = Scheduler(self.blocks, max_num_seqs, budget)
        self.simulation = Simulation(self.scheduler)
        self.num_added = 0

    def add(self, flow: tuple[str, str], count: int = 1, prompt: int = 4, new_tokens: int = 10) -> list[Request]:
        added = []
        for _ in range(count):
            self.num_added += 1
            arrival = Arrival(0, [self.num_added] * prompt, new_tokens, "plain", flow=flow)
            added.append(request_of(self.num_added, arrival))
            self.scheduler.add(added[-1])
        return added

    def run(self, num_steps: int) -> list[list[Request]]:
        """Run steps; return which requests each advanced."""
        return [list(self.simulation.step()) for _ in range(num_steps)]

    def steps_until(self, request: Request) -> int:
        for count in range(1, 500):
            self.simulation.step()
            if request.finished:
                return count
        raise AssertionError("it does not end")

    @property
    def num_running(self) -> Counter[str]:
        return Counter(request.tenant for request in self.scheduler.running)


@pytest.mark.parametrize("other", [B, SECOND_OF_A])
def test_a_short_request_does_not_wait_for_a_call_of_many_prompts(other: tuple[str, str]) -> None:
    """All places are taken by one call, whose requests are long: the last that started gives up its place."""
    world = World()
    many = world.add(A, 40, new_tokens=15)
    world.run(3)
    [short] = world.add(other, new_tokens=1)
    assert world.steps_until(short) <= 3
    assert world.scheduler.num_preemptions == 1
    while world.scheduler.has_requests:
        world.simulation.step()
    assert all(len(each.output_token_ids) == 15 for each in many) and world.scheduler.num_preemptions == 1
    assert not world.scheduler.waiting.tenants


def test_places_are_divided_and_stay_so() -> None:
    """With as much to do, two tenants come to have as many places, and few requests have to give one up."""
    world = World(max_num_seqs=6)
    world.add(A, 60, new_tokens=18)
    world.run(2)
    world.add(B, 60, new_tokens=18)
    world.run(8)
    assert world.num_running == {"a": 3, "b": 3} and world.scheduler.num_preemptions == 3
    advanced = Counter(each.tenant for step in world.run(60) for each in step)
    assert abs(advanced["a"] - advanced["b"]) <= 18 and sum(advanced.values()) == 6 * 60
    assert world.scheduler.num_preemptions <= 6  # of 20 requests that were begun


def test_a_place_that_gets_free_goes_to_the_tenant_that_got_least() -> None:
    """By tokens, not by requests: of two tenants with long and short prompts the latter begins more requests."""
    world = World(max_num_seqs=2, budget=30)
    long, short = world.add(A, 20, prompt=20, new_tokens=1), world.add(B, 60, prompt=4, new_tokens=1)
    served = Counter[str]()
    for _ in range(12):
        for request in world.simulation.step():
            served[request.tenant] += request.num_prompt_tokens
    assert abs(served["a"] - served["b"]) <= 30
    assert sum(each.finished for each in short) > 3 * sum(each.finished for each in long) > 0


def test_a_tenant_that_comes_back_has_not_saved_up_turns() -> None:
    world = World(max_num_seqs=1, budget=30)
    world.add(A, 10, new_tokens=5)
    [early] = world.add(B, new_tokens=1)
    world.steps_until(early)
    world.run(20)
    world.add(B, 10, new_tokens=5)
    order = [each.tenant for _ in range(60) for each in world.simulation.step() if each.finished]
    assert len(order) == 12 and abs(order.count("a") - order.count("b")) <= 2
    assert max(len(list(group)) for _, group in groupby(order)) <= 3  # and not all ten


def test_requests_of_one_call_keep_their_order() -> None:
    world = World(max_num_seqs=3)
    added = world.add(A, 9, new_tokens=1)
    assert [sorted(step, key=added.index) for step in world.run(3)] == [added[:3], added[3:6], added[6:]]


@pytest.mark.parametrize("other", [B, SECOND_OF_A])
def test_a_long_prompt_leaves_others_a_part_of_every_step(other: tuple[str, str]) -> None:
    world = World(num_blocks=4000, budget=4 * MIN_SHARE)
    long = request_of(0, Arrival(0, [0] * 20 * MIN_SHARE, 1, "plain", flow=A))
    world.scheduler.add(long)
    world.scheduler.advance(world.scheduler.schedule())
    assert long.num_computed_tokens == 4 * MIN_SHARE
    half = request_of(1, Arrival(0, [1] * 3 * MIN_SHARE, 1, "plain", flow=other))
    world.scheduler.add(half)
    output = world.scheduler.schedule()
    assert {item.request: item.num_tokens for item in output.scheduled} == dict.fromkeys((long, half), 2 * MIN_SHARE)
    world.scheduler.advance(output)
    output = world.scheduler.schedule()  # what one does not need, the other gets
    assert {item.request: item.num_tokens for item in output.scheduled} == {half: MIN_SHARE, long: 3 * MIN_SHARE}


@given(needs=st.lists(st.integers(1, 2000), min_size=1, max_size=40), total=st.integers(1, 4096))
def test_prefill_is_divided_without_loss(needs: list[int], total: int) -> None:
    given_to = divide_prefill({str(index): need for index, need in enumerate(needs)}, total)
    shares = [given_to[str(index)] for index in range(len(needs))]
    assert sum(shares) == min(total, sum(needs)) and all(0 <= s <= n for s, n in zip(shares, needs, strict=True))
    assert shares[0] >= min(needs[0], total // min(len(needs), max(1, total // MIN_SHARE)))


def test_pages_are_given_up_for_a_tenant_that_has_less() -> None:
    world = World(num_blocks=2 * MAX_LEN // SIZE, max_num_seqs=16)
    world.add(A, 6, prompt=6, new_tokens=12)
    world.run(2)
    while world.blocks.num_free_blocks > 1:
        world.simulation.step()
    [short] = world.add(B, prompt=4, new_tokens=1)
    assert world.steps_until(short) <= 3


def test_a_step_that_still_runs_is_read_before_a_request_gives_up_its_place() -> None:
    world = World()
    world.add(A, 8)
    world.run(2)
    world.add(B)
    world.run(1)  # what A gets counts from now on
    assert world.num_running == {"a": 4}
    assert not world.scheduler.schedule(ahead=True).scheduled and world.num_running == {"a": 4}
    world.run(1)
    assert world.num_running == {"a": 3, "b": 1}


def test_a_higher_priority_is_not_given_up() -> None:
    world = World()
    for request in world.add(A, 4):
        world.scheduler.prioritize(request, -1)
    world.run(2)
    [short] = world.add(B, new_tokens=1)
    assert world.steps_until(short) > 5 and world.scheduler.num_preemptions == 0


def test_a_tenant_of_three_times_the_weight_gets_three_times_as_much() -> None:
    world = World(max_num_seqs=4)
    world.add(A, 60, new_tokens=6)
    world.run(2)
    for request in world.add(B, 60, new_tokens=6):
        request.owner = Owner("b", 3.0)
        world.scheduler.waiting.tenants["b"].weight = 3.0
    world.run(10)
    advanced = Counter(each.tenant for step in world.run(80) for each in step)
    assert 2.5 <= advanced["b"] / advanced["a"] <= 3.5
