"""`Server`: what the endpoints share. One is made for each application."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fastapi import Request, Response

from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.errors import QueueFullError
from vllm_blend.engine.request_table import counted, is_full
from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.metrics import ServerMetrics
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.passages import PassageFinder
from vllm_blend.entrypoints.openai.passages.stored import StoredPassages
from vllm_blend.entrypoints.openai.tenancy import CURRENT, Tenant
from vllm_blend.entrypoints.openai.tracing import Tracing
from vllm_blend.entrypoints.openai.turns import Pace, Turns

P = ParamSpec("P")
T = TypeVar("T")
BEGUN = 8  # requests that begin in one round of the event loop, at some 0.2 ms each
# Whether the body of the task's request is long: short ones do not wait behind all of these.
IS_LONG: ContextVar[bool] = ContextVar("is long", default=False)
INLINE_VALUES = 1024  # longer answers are written in another thread: streams go on meanwhile


@dataclass
class Server:
    """The engine, the options, and threads for what takes long, so that it keeps no stream waiting.

    One thread tokenizes, because not every tokenizer can be used by several at a time, and one reads long bodies and
    writes long answers. `tracing` makes spans; None for no traces.
    """

    engine: AsyncLLM
    options: ServerOptions
    tracing: Tracing | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.chat_template = read_chat_template(self.options.chat_template)
        self.model_names = tuple(self.options.served_model_name or (self.engine.config.model.model,))
        self.passages = PassageFinder(self.options.detect_chunks)
        self.stored = StoredPassages(self.passages)
        self.num_encoding: Counter[str] = Counter()  # passages that /v1/chunks is having encoded, by tenant
        has_keys = self.options.api_key is not None or self.options.api_keys is not None
        shows_tenants = self.options.tenant_metrics
        self.metrics = ServerMetrics(self.engine, self.model_name, not has_keys, shows_tenants)
        self._num_tokenizing: Counter[str] = Counter()  # that wait for the thread, or are in it, by tenant
        self.pace = Pace(BEGUN)
        self._tokenizing_turns, self._converting_turns = Turns(), Turns()
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
        self._converting = ThreadPoolExecutor(1, thread_name_prefix="converting")

    @property
    def model_name(self) -> str:
        """Return the model's name as answers have it."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Raise APIError (404) for a model that is not this server's. None stands for the only one."""
        if name is not None and name not in self.model_names:
            raise APIError(
                404,
                f"the model {name[:200]!r} does not exist: this server has {', '.join(map(repr, self.model_names))}",
                param="model",
                code="model_not_found",
            )

    async def in_tokenizing_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function returns that uses the tokenizer. Raises QueueFullError if too many wait for that."""
        limit, tenant = self.options.max_queued_requests, CURRENT.get().name
        if is_full(self._num_tokenizing, tenant, 1, limit):
            raise QueueFullError(
                f"{limit} requests wait to be tokenized, as many as may (--max-queued-requests): try again in a second",
                retry_after=1.0,
            )
        with counted(self._num_tokenizing, tenant):
            async with self._tokenizing_turns.turn(tenant, "long" if IS_LONG.get() else "short"):
                return await _run_in(self._tokenizing, partial(function, *args, **kwargs))

    async def in_converting_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function returns that reads a long body or writes a long answer."""
        async with self._converting_turns.turn(CURRENT.get().name):
            return await _run_in(self._converting, partial(function, *args, **kwargs))

    async def prepare(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a function returns that makes the prompts of a request from its body. Raises QueueFullError,
        EngineDeadError or ShuttingDownError, before any work, if the engine could not take the request now."""
        self.engine.check_room(1, CURRENT.get().name)
        return await self.in_tokenizing_thread(function, *args, **kwargs)

    async def write(self, function: Callable[[], T], num_values: int) -> T:
        """Return what a function returns that writes an answer of about so many tokens and log-probabilities."""
        if num_values <= INLINE_VALUES:
            return function()
        return await self.in_converting_thread(function)

    async def json_answer(self, function: Callable[[], str], num_values: int) -> Response:
        """Return the answer whose JSON text a function makes of about so many tokens and log-probabilities."""
        return Response(await self.write(function, num_values), media_type="application/json")

    def close(self) -> None:
        """End the threads."""
        for thread in (self._tokenizing, self._converting):
            thread.shutdown(wait=False, cancel_futures=True)


async def _run_in(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, partial(copy_context().run, work))


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


def note(request: Request, **fields: Any) -> None:
    """Add fields to the line that the log has for a request."""
    request.scope["state"].setdefault("log_fields", {}).update(fields)


def read_chat_template(given: str | None) -> str | None:
    """Return the template in a file, or the template itself if it is given as text.

    Raises ValueError for the name of a file that cannot be read.
    """
    if given is None or any(sign in given for sign in "{}\n"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template={given!r} cannot be read ({error}): give a Jinja file, or the text of a template"
        ) from error
