"""What the engine process does with many requests that have come: tenants and calls have theirs added in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from vllm_blend import SamplingParams
from vllm_blend.engine.process.main import ADDED, EngineLoop
from vllm_blend.engine.process.messages import Abort, Add, new_encoder
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.owners import Owner

pytestmark = pytest.mark.cpu_only


def test_one_request_does_not_wait_behind_a_thousand_of_another_call() -> None:
    added: list[int] = []
    aborted: list[str] = []
    engine: Any = SimpleNamespace(
        is_idle=False,
        prepare=None,
        needs_preparation=lambda params: False,
        add=lambda new: added.append(int(new.request_id)),
        abort_request=aborted.extend,
    )
    context = zmq.Context()
    with context, context.socket(zmq.PUSH) as asking, context.socket(zmq.PULL) as receiver:
        asking.set_hwm(0)
        receiver.set_hwm(0)
        receiver.bind("inproc://asked")
        asking.connect("inproc://asked")
        loop = EngineLoop(engine, receiver, asking)

        def ask(number: int, call: str, tenant: str = "a") -> None:
            new = Add(number, str(number), ParsedPrompt([1]), SamplingParams(), 0.0, 0, Owner(tenant), call)
            asking.send(new_encoder().encode(new))

        for number in range(1000):
            ask(number, "many")
        ask(1000, "one")
        ask(1001, "of another tenant", "b")
        asking.send(new_encoder().encode(Abort(list(range(500, 1000)))))
        loop._receive()
        assert len(added) == ADDED and {1000, 1001} <= set(added[:4])
        while loop._num_arrived:
            loop._receive()
        assert sorted(added) == [*range(500), 1000, 1001] and not aborted
        assert [number for number in added if number < 500] == list(range(500))
