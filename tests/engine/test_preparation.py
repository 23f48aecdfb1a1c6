"""Requests that take long to prepare: tenants take turns, no tenant waits for one other, and queues are bounded."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from tests.waiting import wait_until
from vllm_blend.engine.errors import QueueFullError
from vllm_blend.engine.process import preparation
from vllm_blend.engine.process.messages import Add
from vllm_blend.engine.process.preparation import Preparation
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.owners import Owner
from vllm_blend.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu_only


class Gated:
    """Prepares when a test lets it, and notes who was begun. A request's `seed` is its number."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.gates: defaultdict[int, threading.Event] = defaultdict(threading.Event)
        self.queue = Preparation(self._prepare)
        self._num_added = 0

    def _prepare(self, params: SamplingParams) -> None:
        assert params.seed is not None
        self.begun.append(params.seed)
        assert self.gates[params.seed].wait(60)
        if params.seed == 5:
            raise RuntimeError("what is said where the request is added")

    def add(self, *tenants: str) -> None:
        for tenant in tenants:
            number, self._num_added = self._num_added, self._num_added + 1
            params = SamplingParams(seed=number)
            self.queue.add(Add(number, str(number), ParsedPrompt([1]), params, 0.0, 0, Owner(tenant)))

    def finish(self, *numbers: int) -> None:
        for number in numbers:
            self.gates[number].set()

    def take(self, count: int) -> list[int]:
        taken: list[int] = []

        def took() -> bool:
            taken.extend(new.number for new in self.queue.take_done())
            return len(taken) >= count

        wait_until(took)
        return taken


def test_a_tenant_does_not_wait_for_another_ones_long_queue() -> None:
    gated = Gated()
    gated.add("a", "a", "a", "b", "b", "c")
    wait_until(lambda: len(gated.begun) == 2)
    assert sorted(gated.begun) == [0, 3]  # one of a's, one of b's
    gated.finish(3)
    assert gated.take(1) == [3]
    wait_until(lambda: len(gated.begun) == 3)
    assert gated.begun[2] == 5  # c's, before the second of b: a's first is still being prepared
    gated.finish(5)
    assert gated.take(1) == [5]  # an error ends no thread
    wait_until(lambda: len(gated.begun) == 4)
    assert gated.begun[3] == 4
    gated.finish(*range(6))
    assert sorted(gated.take(4)) == [0, 1, 2, 4] and len(gated.queue) == 0


def test_what_is_dropped_is_not_prepared_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "MAX_WAITING", 2)
    gated = Gated()
    gated.add("a")
    wait_until(lambda: gated.begun == [0])
    gated.add("a", "a")
    with pytest.raises(QueueFullError, match="as many as may"):
        gated.add("a")
    gated.add("b")  # another tenant's queue is its own
    for number in (0, 1, 7):
        gated.queue.drop(number)
    gated.finish(0, 2, 4)
    assert sorted(gated.take(2)) == [2, 4] and sorted(gated.begun) == [0, 2, 4] and len(gated.queue) == 0
