"""The requests of one HTTP call, run together: outputs as they come, or at the end; all end when the client leaves."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.entrypoints.openai.errors import APIError, bad_request
from vllm_blend.entrypoints.openai.metrics import ServerMetrics
from vllm_blend.entrypoints.openai.server import note, server_of, tenant_of
from vllm_blend.entrypoints.openai.tenancy import ANYONE, Tenant
from vllm_blend.entrypoints.openai.tracing import RequestSpan, trace_headers
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.layers.sampler import NO_TOKEN_LEFT
from vllm_blend.outputs import RequestOutput
from vllm_blend.sampling_params import RequestOutputKind, SamplingParams

T = TypeVar("T")
MAX_OUTPUTS_WAITING = 16  # of a call, for the client to read
_Item = tuple[int, RequestOutput | BaseException | None]
_ending: set[asyncio.Task[None]] = set()  # cancelled ones, which nothing else refers to


class ClientDisconnected(Exception):
    """The client has closed the connection before it was answered."""


@dataclass(frozen=True)
class Generation:
    """The prompts of a call, each with its sampling parameters."""

    engine: AsyncLLM
    metrics: ServerMetrics
    request_id: str
    jobs: Sequence[tuple[ParsedPrompt, SamplingParams]]
    priority: int = 0
    deadline: float | None = None
    tenant: Tenant = ANYONE
    arrival_time: float = field(default_factory=time.time)
    new_span: Callable[[SamplingParams], RequestSpan] | None = None  # where requests are traced

    @classmethod
    def from_call(
        cls,
        request: Request,
        request_id: str,
        jobs: Sequence[tuple[ParsedPrompt, SamplingParams]],
        priority: int | None,
    ) -> Generation:
        """Return the generation of a call whose prompts have been tokenized: that time counts, too."""
        server, arrival_time = server_of(request), request.state.arrival_time
        timeout = server.options.request_timeout
        deadline = None if timeout is None else arrival_time + timeout
        note(request, answer_id=request_id)
        new_span = None
        if server.tracing is not None:
            new_span = partial(
                server.tracing.request, request_id, server.model_name, arrival_time, trace_headers(request.headers)
            )
        observed = (server.engine, server.metrics, request_id, jobs, priority or 0, deadline)
        return cls(*observed, tenant_of(request), arrival_time, new_span)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yield (number of the prompt, output) as outputs come. Closing the generator aborts what still runs.

        Raises the first error that any of the requests meets, and APIError for one that was aborted or has failed.
        """
        # A slow reader, as its client is, gets fewer and larger outputs: those that wait are not kept one by one.
        queue: asyncio.Queue[_Item] = asyncio.Queue(MAX_OUTPUTS_WAITING)
        # Requests have tasks of their own, so that closing this generator does not wait for the engine to abort them.
        tasks: list[asyncio.Task[None]] = []
        try:
            for index in range(len(self.jobs)):
                tasks.append(asyncio.create_task(self._run(index, queue)))
                await asyncio.sleep(0)  # other calls have their turn before the next of many prompts begins
            remaining = len(tasks)
            while remaining:
                index, item = await queue.get()
                if item is None:
                    remaining -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    self._check(item)
                    yield index, item
                    if not queue.empty():  # other calls have their turn between the outputs of many prompts
                        await asyncio.sleep(0)
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
                    _ending.add(task)
                    task.add_done_callback(_ending.discard)

    async def final(self) -> list[RequestOutput]:
        """Return the last output of every prompt."""
        found: dict[int, RequestOutput] = {}
        async with aclosing(self.outputs()) as outputs:
            async for index, output in outputs:
                found[index] = output
        return [found[index] for index in range(len(self.jobs))]

    async def _run(self, index: int, queue: asyncio.Queue[_Item]) -> None:
        prompt, params = self.jobs[index]
        try:
            with ExitStack() as stack:
                observed = (prompt, params, self.arrival_time, self.tenant.name)
                observers = [stack.enter_context(self.metrics.request(*observed)).on_output]
                if self.tenant.limits.tokens_per_minute is not None:
                    is_delta = params.output_kind is RequestOutputKind.DELTA
                    observers.append(TokenCounter(self.tenant, len(prompt.token_ids), is_delta).on_output)
                if self.new_span is not None:
                    observers.append(stack.enter_context(self.new_span(params)).on_output)
                outputs = self.engine.generate(
                    prompt,
                    params,
                    # Clients choose request ids, and may use one twice.
                    f"{self.request_id}-{index}-{secrets.token_hex(4)}",
                    priority=self.priority,
                    arrival_time=self.arrival_time,
                    deadline=self.deadline,
                    tenant=self.tenant.name,
                    call=self.request_id,
                    weight=self.tenant.owner.weight,
                    max_store_bytes=self.tenant.owner.max_bytes,
                )
                async with aclosing(outputs):
                    async for output in outputs:
                        for observe in observers:
                            observe(output)
                        await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    def _check(self, output: RequestOutput) -> None:
        reasons = [completion.finish_reason for completion in output.outputs]
        if "error" in reasons:
            if output.error and output.error.startswith(NO_TOKEN_LEFT):  # the request contradicts itself
                raise bad_request(f"the settings of the request leave no answer: {output.error}; leave one of them out")
            raise APIError(500, f"the generation failed: {output.error}", code="generation_failed")
        if "abort" in reasons:
            if self.deadline is not None and time.time() >= self.deadline - 0.5:
                raise APIError(504, "the request took longer than --request-timeout allows", code="timeout")
            raise APIError(503, "the request was aborted: try again", code="aborted")


class TokenCounter:
    """Counts the tokens of a prompt and of its answer as a tenant's, as they come."""

    def __init__(self, tenant: Tenant, num_prompt_tokens: int, is_delta: bool) -> None:
        self._tenant, self._is_delta, self._num_counted = tenant, is_delta, 0
        tenant.usage.count(tenant.limits, num_prompt_tokens)

    def on_output(self, output: RequestOutput) -> None:
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        self._tenant.usage.count(self._tenant.limits, num_tokens - self._num_counted)
        self._num_counted = 0 if self._is_delta else num_tokens


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise ClientDisconnected if the client leaves before."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
