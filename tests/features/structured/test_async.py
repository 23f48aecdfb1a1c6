"""Forms over an engine process: they are compiled there while other requests go on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.engine.async_engines import async_llm, at_once, final
from tests.waiting import DEADLINE
from vllm_blend import SamplingParams, StructuredOutputsParams

PROMPT = "Who"


def asked(regex: str) -> SamplingParams:
    return SamplingParams(max_tokens=30, temperature=0.0, structured_outputs=StructuredOutputsParams(regex=regex))


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(each) for path in Path(f"/proc/{pid}/task").glob("*/children") for each in path.read_text().split()]


def test_forms_are_held_refused_and_abandoned() -> None:
    async def run() -> None:
        first, second = await at_once(llm, [PROMPT] * 2, [asked("[0-9]{3}-[ab]"), SamplingParams(max_tokens=5, seed=1)])
        assert len(first.outputs[0].text) == 5 and first.outputs[0].text[3] == "-" and second.error is None
        with pytest.raises(ValueError, match=r"structured_outputs\.regex is refused: .*unclosed group"):
            await final(llm, PROMPT, asked("("))
        left = asyncio.ensure_future(final(llm, PROMPT, asked("(a{1000}){1000}")))
        await asyncio.sleep(0)  # it begins
        free = await final(llm, PROMPT, SamplingParams(max_tokens=5, seed=1))  # does not wait for that form
        assert free.outputs[0].text == second.outputs[0].text
        assert not left.done()
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert llm.num_unfinished_requests == 0
        assert llm.engine_pid is not None
        for pid in children(llm.engine_pid):  # the one in which that form is tried, for nothing
            os.kill(pid, signal.SIGKILL)
        known = await final(llm, PROMPT, asked("[0-9]{3}-[ab]"))
        assert known.outputs[0].text == first.outputs[0].text

    config = {"compile_seconds": DEADLINE}
    with async_llm(max_model_len=256, num_gpu_blocks_override=40, structured_outputs_config=config) as llm:
        asyncio.run(run())
