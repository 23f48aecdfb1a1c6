"""Tenants take turns at what is done one piece at a time, and none fills the queue for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.engine.request_table import is_full
from vllm_blend.entrypoints.openai.turns import Pace, Turns

pytestmark = pytest.mark.cpu_only


def run(scenario: Callable[[Turns, list[str]], Coroutine[None, None, None]]) -> list[str]:
    order: list[str] = []
    asyncio.run(scenario(Turns(), order))
    return order


async def work(turns: Turns, name: str, order: list[str], running: list[int]) -> None:
    async with turns.turn(name[0]):
        running[0] += 1
        assert running[0] == 1
        order.append(name)
        await asyncio.sleep(0)
        running[0] -= 1


def test_a_tenant_waits_for_one_piece_of_each_other_one() -> None:
    async def scenario(turns: Turns, order: list[str]) -> None:
        names = ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
        await asyncio.gather(*(work(turns, name, order, [0]) for name in names))
        await work(turns, "a4", order, [0])  # nothing else is waiting

    assert run(scenario) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]


def test_short_requests_do_not_wait_behind_all_long_ones() -> None:
    async def scenario(turns: Turns, order: list[str]) -> None:
        async def task(name: str, kind: str) -> None:
            async with turns.turn(name[0], kind):
                order.append(name)
                await asyncio.sleep(0)

        kinds = {"a0": "long", "a1": "long", "a2": "long", "a3": "short", "a4": "short", "b0": "long"}
        await asyncio.gather(*(task(name, kind) for name, kind in kinds.items()))

    assert run(scenario) == ["a0", "b0", "a1", "a3", "a2", "a4"]


def test_a_cancelled_task_does_not_hold_up_others() -> None:
    async def scenario(turns: Turns, order: list[str]) -> None:
        running = [0]
        tasks = [asyncio.create_task(work(turns, f"a{index}", order, running)) for index in range(5)]
        await asyncio.sleep(0)
        tasks[1].cancel()  # while it waits
        while "a0" not in order or running[0]:
            await asyncio.sleep(0)
        tasks[2].cancel()  # which was given the turn just now, or is having it
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(RuntimeError, match="on fire"):
            async with turns.turn("a"):
                raise RuntimeError("on fire")
        await work(turns, "b0", order, [0])

    assert [name for name in run(scenario) if name != "a2"] == ["a0", "a3", "a4", "b0"]


@given(
    counts=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 50)),
    tenant=st.sampled_from("abcde"),
    new=st.integers(1, 20),
    limit=st.integers(1, 100),
)
def test_a_full_queue_has_room_for_a_tenant_that_has_less_than_its_part(
    counts: dict[str, int], tenant: str, new: int, limit: int
) -> None:
    total, own = sum(counts.values()), counts.get(tenant, 0)
    full = is_full(counts, tenant, new, limit)
    if not counts or total + new <= limit:
        assert not full
    elif counts.keys() <= {tenant}:
        assert full  # one tenant has the whole queue, and no more
    else:
        assert full == (own + new > limit // len({*counts, tenant}))


def test_requests_that_come_at_once_begin_at_a_pace() -> None:
    """In every round of the event loop a few begin, addresses in turn, and other work goes on between."""
    begun: list[str] = []
    rounds: list[int] = []

    async def request(pace: Pace, name: str) -> None:
        await pace.wait(name[0])
        begun.append(name)

    async def scenario() -> None:
        pace, loop = Pace(3), asyncio.get_running_loop()

        def watch() -> None:
            rounds.append(len(begun))
            if len(begun) < 14:
                loop.call_soon(watch)

        loop.call_soon(watch)
        tasks = [loop.create_task(request(pace, f"a{index:02}")) for index in range(12)]
        tasks += [loop.create_task(request(pace, f"b{index}")) for index in range(2)]
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for index in range(2):  # nothing is left of it: tasks go on at once
            await asyncio.wait_for(request(pace, f"c{index}"), 1)
        assert not pace._queue._waiting and list(pace._queue._last) == [""]

    asyncio.run(scenario())
    assert all(later - earlier <= 3 for earlier, later in pairwise(rounds)), rounds
    assert begun.index("b1") < begun.index("a07")
    assert sorted(begun) == sorted({*(f"a{i:02}" for i in range(12) if i != 5), "b0", "b1", "c0", "c1"})
