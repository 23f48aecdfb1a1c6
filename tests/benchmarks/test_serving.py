"""What the load generator says of requests and memory, by ones that are made up."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.server_watch import MIB, Watch
from benchmarks.serving import first_token_ms, is_interrupted, rate_of, rates, search_rate
from benchmarks.serving_requests import Served

pytestmark = pytest.mark.cpu_only


def served(sent: float, total: float = 1.0, first: float = 0.5, **fields: Any) -> Served:
    return replace(Served("off", 1, sent, first, total, 4, {}), **fields)


def test_rates() -> None:
    """Of closed loops, what ended between the ramp and the last sending counts; of open ones, what arrived."""
    each_second = [served(float(second)) for second in range(101)]
    assert rate_of(each_second, False, 20.0) == pytest.approx(1.0, rel=0.03)
    assert rate_of(each_second, True, 0.0) == pytest.approx(1.0, rel=0.03)
    twice_as_many_later = each_second + [served(50.5 + second) for second in range(50)]
    early, _, _, late = rates(twice_as_many_later, True, 0.0)
    assert early == pytest.approx(1.0, rel=0.05) and late == pytest.approx(2.0, rel=0.05)
    assert rates([served(0.0, error="500: no")], True, 0.0) == [0.0] * 4
    assert rate_of([served(0.0), served(0.0, 2.0)], False, 0.0) == 1.0  # too short for anything in between


def test_first_tokens_after_the_ramp() -> None:
    slow, failed = [served(0.0, first=9.0)], [served(30.0, first=7.0, error="x")]
    counted = [served(20.0 + number, first=number / 100) for number in range(1, 101)]
    expected = np.percentile(np.arange(1, 101) * 10.0, [50, 90, 99])
    assert first_token_ms(slow + counted + failed, 20.0) == pytest.approx(list(expected))


@pytest.mark.parametrize(
    "holds, tried, found", [(10.0, [8], 8.0), (5.0, [8, 6, 5, 5.5], 5.0), (0.0, [8, 6, 5, 4.5], 0.0)]
)
def test_the_rate_that_holds_the_limit_is_searched(holds: float, tried: list[float], found: float) -> None:
    asked: list[float] = []

    async def part(mode: str, rate: float, is_open: bool) -> list[Served]:
        assert is_open
        asked.append(rate)
        return [served(float(second), first=0.9 if rate <= holds else 1.1) for second in range(10)]

    args = Namespace(tries=4, first_token_limit=1.0)
    rate, p99 = asyncio.run(search_rate(part, "off", 8.0, args))
    assert (rate, asked) == (found, tried)
    assert (p99 == pytest.approx(900.0)) if found else np.isnan(p99)


def test_growth_and_what_is_left_are_problems() -> None:
    """The first quarter is not compared: it fills caches."""
    idle = {"requests": {"running": 0, "waiting": 0}, "kv_cache_usage": 0.0}
    flat = [(5.0 * at, (300 + min(at, 10)) * MIB, 900 * MIB) for at in range(40)]
    watch = Watch(1, samples=flat, end=idle)
    assert watch.growth() == (0.0, 0.0) and watch.problems(1.0) == []
    watch.samples = [(5.0 * at, (300 + at) * MIB, 900 * MIB) for at in range(40)]
    assert watch.growth()[0] == 20 * MIB
    assert watch.problems(19.0) == ["the memory of the server grew by 20 MiB"] and watch.problems(21.0) == []
    left = Watch(1, [("engine", 5.0)], flat, end=idle | {"kv_cache_usage": 0.25})
    pages, kill = left.problems(1.0)
    assert "25.00% of the pages are left" in pages and kill == "engine was not killed"


def test_only_an_engine_that_was_killed_excuses_a_request() -> None:
    watch = Watch(1, outages=[[10.0, 12.0]])
    failed = served(9.5, error="503", code="engine_unavailable")
    assert is_interrupted(failed, watch)
    assert not is_interrupted(replace(failed, sent=13.0), watch)
    assert not is_interrupted(replace(failed, code="queue_full"), watch)
