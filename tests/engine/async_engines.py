"""Engines in their own processes, for tests: made on one thread of the CPU, read by `asyncio.run`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests import settings
from tests.engine.engines import DEMO, PATIENCE, threads
from vllm_blend import EngineArgs, RequestOutput, SamplingParams
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.timeouts import DEFAULT_TIMEOUTS, Timeouts

_ids = itertools.count()


def new_async_llm(
    model: str = DEMO, max_queued_requests: int | None = None, timeouts: Timeouts = DEFAULT_TIMEOUTS, **arguments: Any
) -> AsyncLLM:
    """An engine where the run wants it. Its process has as many threads as this one when it starts."""
    with threads(1):
        args = EngineArgs(model=model, **(settings.current().engine_arguments() | arguments))
        return AsyncLLM.from_engine_args(args, max_queued_requests=max_queued_requests, timeouts=timeouts)


@contextmanager
def async_llm(**arguments: Any) -> Iterator[AsyncLLM]:
    """An engine that is shut down in the end."""
    llm = new_async_llm(**arguments)
    try:
        yield llm
    finally:
        llm.shutdown()


async def stream(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """Return all outputs of a request."""
    request_id = options.pop("request_id", f"test-{next(_ids)}")
    return [output async for output in llm.generate(prompt, params, request_id, **options)]


async def final(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    """Return the last output of a request."""
    return (await stream(llm, prompt, params, **options))[-1]


async def at_once(llm: AsyncLLM, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Return the last outputs of requests that run at the same time."""
    return list(await asyncio.gather(*(final(llm, p, q) for p, q in zip(prompts, params, strict=True))))


def comparable(output: RequestOutput) -> RequestOutput:
    """An output without what differs from run to run: its id and its times."""
    return replace(output, request_id="", metrics=None)


async def metrics(llm: AsyncLLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in await llm.get_metrics()}


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until a condition, which may be a coroutine's, holds."""
    deadline = time.monotonic() + PATIENCE
    while True:
        held = condition()
        if await held if asyncio.iscoroutine(held) else held:
            return
        assert time.monotonic() < deadline, f"not in {PATIENCE:.0f} seconds: {what}"
        await asyncio.sleep(0.01)


async def is_empty(llm: AsyncLLM) -> bool:
    """Return whether no request runs or waits, and no page is in use."""
    found = await metrics(llm)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return not any(found[name] for name in names)


async def runs(llm: AsyncLLM) -> bool:
    """Return whether a request runs."""
    return (await metrics(llm))["vllm:num_requests_running"] > 0
