"""Prompts gather their chunks in turn: tenants take turns, and so do the calls of one tenant."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_blend.engine.admission import AdmissionQueue
from vllm_blend.kv_store.owners import Owner
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request

pytestmark = pytest.mark.cpu_only


def pending(name: str, num_tokens: int = 1) -> Any:
    """A prompt of a tenant and a call, by a name such as `a1-first`."""
    request = Request(name, [1], None, RequestMetrics(0.0))
    request.owner, request.call = Owner(name[0]), name[1]
    return SimpleNamespace(name=name, num_tokens=num_tokens, requests=[request])


def admitted(queue: AdmissionQueue) -> list[str]:
    names = []
    while (each := queue.next()) is not None:
        names.append(each.name)  # type: ignore[attr-defined]
    return names


def test_tenants_and_their_calls_take_turns() -> None:
    queue = AdmissionQueue(1000, 1)
    prompts = [pending(name) for name in ("a1-0", "a1-1", "a1-2", "a1-3", "b1-0", "a2-0", "b1-1", "a2-1")]
    for each in prompts:
        queue.add(each)
    queue.forget([request for each in (prompts[3], prompts[7]) for request in each.requests])
    assert admitted(queue) == ["a1-0", "b1-0", "a2-0", "b1-1", "a1-1", "a1-2"]
    assert queue.next() is None


def test_the_next_in_turn_waits_for_room_and_no_other_passes_it() -> None:
    queue = AdmissionQueue(10, 1)
    first, large, small = pending("a1-0", 8), pending("b1-0", 5), pending("a1-1", 1)
    for each in (first, large, small):
        queue.add(each)
    assert admitted(queue) == ["a1-0"]
    first.requests.clear()
    queue.readmit([])
    del first
    assert admitted(queue) == ["b1-0", "a1-1"]  # its requests are gone, and with them what they held
