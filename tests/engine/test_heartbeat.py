"""An engine process that hangs: how it is noticed, and that long steps and pauses are none of it."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import msgspec
import pytest
import zmq

from tests.engine.async_engines import new_async_llm
from tests.entrypoints.openai.servers import REUSE_DEMO, serving
from tests.waiting import DEADLINE, wait_until
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.errors import ShuttingDownError
from vllm_blend.engine.process.heartbeat import Heart, Pulse
from vllm_blend.engine.process.messages import Beat, FromEngine
from vllm_blend.engine.timeouts import Timeouts

pytestmark = pytest.mark.cpu_only

LIMITS = Timeouts(heartbeat=60.0, step=600.0)


def test_what_counts_as_hanging() -> None:
    now = [1000.0]
    pulse = Pulse(7, LIMITS, lambda: now[0])

    def beats(seconds: int, num_turns: int) -> None:
        for _ in range(seconds):
            now[0] += 1
            pulse.enter(Beat(num_turns))

    beats(600, 1)  # a long step
    assert pulse.problem() is None
    now[0] += 60
    assert pulse.problem() is None
    now[0] += 1
    assert "(pid 7) has said nothing for 61 seconds, and heartbeat_timeout=60" in str(pulse.problem())
    beats(1, 2)
    assert pulse.problem() is None  # it goes on
    beats(600, 2)
    assert pulse.problem() is None
    beats(1, 2)
    assert "a step of the engine process (pid 7) has taken 601 seconds so far, and step_timeout=600" in str(
        pulse.problem()
    )
    beats(1, 3)
    assert pulse.problem() is None


def test_the_heart_beats_while_the_loop_does_not_come_round() -> None:
    context, turns = zmq.Context(), [5]
    with context.socket(zmq.PULL) as receiver:
        receiver.bind("inproc://heart")
        decoder = msgspec.msgpack.Decoder(FromEngine)
        with Heart(context, "inproc://heart", lambda: turns[0]):
            assert [decoder.decode(receiver.recv()) for _ in range(2)] == [Beat(5), Beat(5)]
    context.destroy(linger=0)


def test_a_stopped_engine_is_unhealthy_until_it_goes_on() -> None:
    """Requests that run are answered then. Draining waits for calls, and ends those of an engine that hangs."""
    llm = new_async_llm(REUSE_DEMO, num_gpu_blocks_override=65, timeouts=Timeouts(heartbeat=2.0))
    pid = llm.engine_pid
    assert pid is not None
    try:
        with serving(llm) as url, httpx.Client(base_url=url, timeout=DEADLINE) as client:
            wait_until(lambda: client.get("/health").status_code == 200)
            turns = _turns(llm)
            wait_until(lambda: _turns(llm) > max(turns, 0))  # an idle loop comes round, too: it is not in a long step
            os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: client.get("/health").status_code == 503)
            answer = client.get("/health").json()["error"]
            assert f"the engine process (pid {pid}) has said nothing for" in answer["message"]
            status = client.get("/status").json()
            assert not status["engine_up"] and f"(pid {pid}) has said nothing" in status["engine_problem"]
            refused = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: client.get("/health").status_code == 200)
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
            wait_until(lambda: client.get("/status").json()["engine_problem"] is None)
            assert llm.engine_pid == pid
        asyncio.run(_drain_with_calls(llm, pid))
    finally:
        os.kill(pid, signal.SIGCONT)
        llm.shutdown()


async def _drain_with_calls(llm: AsyncLLM, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    first = asyncio.create_task(llm.call("get_metrics"))
    await asyncio.sleep(0)  # it is sent
    await llm.drain(0.0)
    with pytest.raises(ShuttingDownError, match="does not wait any longer"):
        await first
    second = asyncio.create_task(llm.call("get_metrics"))
    await asyncio.sleep(0)
    draining = asyncio.create_task(llm.drain(DEADLINE))
    await asyncio.sleep(0)
    assert not draining.done()
    os.kill(pid, signal.SIGCONT)
    await draining
    assert await second


def _turns(llm: AsyncLLM) -> int:
    """Return how often the engine's loop has come round, as the beats say."""
    pulse = llm._client._pulse
    assert pulse is not None
    return pulse._num_turns
