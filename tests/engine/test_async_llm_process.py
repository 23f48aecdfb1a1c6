"""The engine process of an `AsyncLLM`: how it starts, dies, comes back and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.engine.async_engines import async_llm, final, is_empty, metrics, new_async_llm, until
from tests.engine.engines import PATIENCE, ROOT, demo_prompt, engine, run
from tests.waiting import wait_until
from vllm_blend import EngineArgs, SamplingParams
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.errors import EngineDeadError, ShuttingDownError
from vllm_blend.engine.process.client import EngineClient
from vllm_blend.engine.process.main import EngineLoop
from vllm_blend.engine.process.messages import Ready
from vllm_blend.engine.request_table import RequestTable

pytestmark = pytest.mark.cpu_only
MODEL = str(ROOT / "inputs" / "demo-model-reuse")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
ENDLESS = SamplingParams(max_tokens=600, ignore_eos=True, n=64)


def test_a_life(tmp_path: Path) -> None:
    """A process is killed in mid-run, comes back, finds its chunks on the disk, is drained, and ends."""
    prompts = [demo_prompt(index, 5) for index in (0, 1)]
    with engine(MODEL, enable_blending=True) as offline:
        expected = [run(offline, [prompt], GREEDY)[0] for prompt in prompts]
    with async_llm(model=MODEL, enable_blending=True, chunk_store_path=str(tmp_path)) as llm:
        asyncio.run(_killed_and_back(llm, prompts, [output.outputs for output in expected]))
        asyncio.run(_drained(llm))
        pid = llm.engine_pid
    assert pid is not None
    assert not _exists(pid)
    with pytest.raises(ShuttingDownError, match="shut down"):
        asyncio.run(final(llm, "again", GREEDY))
    llm.shutdown()


async def _killed_and_back(llm: AsyncLLM, prompts: list, expected: list) -> None:  # type: ignore[type-arg]
    assert (await final(llm, prompts[0], GREEDY)).outputs == expected[0]
    assert await llm.call("flush")
    running = [asyncio.ensure_future(final(llm, prompt, ENDLESS)) for prompt in prompts]
    await until(lambda: _runs(llm), "requests run")
    assert llm.engine_pid is not None
    os.kill(llm.engine_pid, signal.SIGKILL)
    for error in await asyncio.gather(*running, return_exceptions=True):
        assert isinstance(error, EngineDeadError)
        assert "SIGKILL" in str(error)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await llm.check_health()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await final(llm, prompts[0], GREEDY)
    await until(lambda: llm.is_running, "the engine is back")
    output = await final(llm, prompts[0], GREEDY)
    assert output.outputs == expected[0]
    assert output.num_found_tokens["disk"] > 0
    assert output.blend is not None and output.blend.num_encoded_tokens == 0
    assert (await final(llm, prompts[1], GREEDY)).outputs == expected[1]
    await llm.check_health()


async def _drained(llm: AsyncLLM) -> None:
    long = asyncio.ensure_future(final(llm, "Where is it?", ENDLESS))
    short = asyncio.ensure_future(final(llm, "Where is it?", GREEDY))
    await until(lambda: llm.num_unfinished_requests == 2, "requests run")
    draining = asyncio.ensure_future(llm.drain(PATIENCE))
    await asyncio.sleep(0)
    with pytest.raises(ShuttingDownError, match="no more requests"):
        await final(llm, "late", GREEDY)
    assert (await short).outputs[0].finish_reason in ("stop", "length")
    assert not draining.done()
    await llm.drain(0)
    assert {completion.finish_reason for completion in (await long).outputs} == {"abort"}
    await draining
    await until(lambda: is_empty(llm), "the pages are free")


def test_an_error_of_loading_is_raised_here() -> None:
    with pytest.raises(ValueError, match="max_model_len=100000 is above") as caught:
        new_async_llm(MODEL, max_model_len=100_000)
    assert "engine process" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="cannot be passed to its process"):
        new_async_llm(MODEL, hf_overrides=lambda config: config)


def test_the_process_follows_its_parent(tmp_path: Path) -> None:
    """A server that is killed leaves no process behind, and what its chunk store had to write is written."""
    script = f"""
import asyncio, os, signal
from vllm_blend import EngineArgs, SamplingParams
from vllm_blend.engine.async_llm import AsyncLLM
llm = AsyncLLM.from_engine_args(EngineArgs(
    model={MODEL!r}, enable_blending=True, chunk_store_path={str(tmp_path)!r}, num_gpu_blocks_override=100))
async def ask():
    prompt = {{"prefix": "Read.", "chunks": ["One passage.", "Another one."], "suffix": "What?"}}
    async for output in llm.generate(prompt, SamplingParams(max_tokens=2), "one"):
        pass
asyncio.run(ask())
print(llm.engine_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not _exists(int(done.stdout)))
    [index] = tmp_path.rglob("index.sqlite3")
    with closing(sqlite3.connect(index)) as connection:
        [count] = connection.execute("SELECT count(*) FROM chunks").fetchone()
    assert count >= 2


def test_a_process_that_keeps_dying_is_started_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has lived for long is started at once."""
    lives, now, delays = [*[5.0] * 8, 3600.0, 5.0, 5.0], [0.0], []
    monkeypatch.setattr("vllm_blend.engine.process.client.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            delays.append(timeout)
            return not lives

    def die() -> str:
        now[0] += lives.pop(0)
        return "it died"

    client = EngineClient(EngineArgs(model=MODEL).create_engine_config(), RequestTable())
    client._ready.set_result(Ready(1, "float32", {}))
    monkeypatch.setattr(client, "_closing", Closing())
    monkeypatch.setattr(client, "_serve", die)
    client._run()
    assert delays == [0, 1, 2, 4, 8, 16, 32, 60, 60, 0, 1, 2]


def test_an_engine_is_given_up_when_steps_keep_failing() -> None:
    """Two failures are tolerated, and forgotten after a step that works."""
    results: list[Exception | None] = [ValueError("1"), ValueError("2"), None, *[ValueError(str(n)) for n in (3, 4, 5)]]

    def step() -> None:
        if (error := results.pop(0)) is not None:
            raise error

    sockets: Any = SimpleNamespace()
    loop = EngineLoop(cast(Any, SimpleNamespace(step=step, prepare=None)), sockets, sockets)
    for _ in range(5):
        loop._step()
    with pytest.raises(ValueError, match="5"):
        loop._step()


async def _runs(llm: AsyncLLM) -> bool:
    return (await metrics(llm))["vllm:num_requests_running"] > 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
