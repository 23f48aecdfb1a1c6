"""`AsyncLLM`: an engine in a process of its own, for asyncio. Text is tokenized and detokenized here, so that streams
cost the engine's steps nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
import weakref
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from vllm_blend.checks import a_type, is_number
from vllm_blend.config import EngineConfig, EngineConfigSource
from vllm_blend.engine import setup
from vllm_blend.engine.async_request import AsyncRequest
from vllm_blend.engine.errors import DeadlineError, QueueFullError, ShuttingDownError
from vllm_blend.engine.metrics import Counter, Gauge, Metric
from vllm_blend.engine.output_processor import OutputProcessor
from vllm_blend.engine.process.client import EngineClient
from vllm_blend.engine.process.messages import Add
from vllm_blend.engine.request_builder import check_chunk_settings, check_length, check_logprobs, check_priority
from vllm_blend.engine.request_table import RequestTable, is_full
from vllm_blend.engine.setup import LoadedModelConfig
from vllm_blend.engine.timeouts import DEFAULT_TIMEOUTS, Timeouts
from vllm_blend.inputs import ParsedPrompt, PromptType
from vllm_blend.kv_store.owners import Owner
from vllm_blend.models.loader import load_hf_config
from vllm_blend.outputs import RequestOutput
from vllm_blend.prompt_parser import parse_prompt
from vllm_blend.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

INLINE_CHARACTERS = 4096  # longer prompts are tokenized in another thread: streams go on meanwhile
DRAIN_POLL_SECONDS = 0.02


class AsyncLLM:
    """vLLM's asynchronous engine: `generate` streams the outputs of a request, and any number may run at a time.

    Use it from asyncio; it works in several event loops, each in a thread of its own, one after the other. An engine
    process that dies is started again: its requests raise EngineDeadError, and so do new ones until it is ready.
    """

    def __init__(
        self, config: EngineConfig, max_queued_requests: int | None = None, timeouts: Timeouts = DEFAULT_TIMEOUTS
    ) -> None:
        """Start the engine process and wait until the model is loaded. Raises the errors of `LLMEngine`, and
        EngineDeadError if the process dies.

        At most `max_queued_requests` completions wait besides the `max_num_seqs` that may run at a time; None: any
        number. `timeouts` say when an engine process counts as hanging: it takes no more requests then, and is left
        alone, as it may go on.
        """
        if max_queued_requests is not None and (type(max_queued_requests) is not int or max_queued_requests < 0):
            raise ValueError(f"max_queued_requests={max_queued_requests!r} must be a non-negative integer, or None")
        self.config, self.max_queued_requests = config, max_queued_requests
        self._table = RequestTable()
        self._client = EngineClient(config, self._table, timeouts)
        self._table.send = self._client.send
        self._numbers = itertools.count()
        self._refuses: str | None = None  # why no more requests are taken
        self._finalizer = weakref.finalize(self, self._client.shut_down)
        self._client.start()
        try:
            self._load()
        except BaseException:
            self._finalizer()
            raise

    def _load(self) -> None:
        model = self.config.model
        hf_config = load_hf_config(model.model, model.revision, model.trust_remote_code, model.hf_overrides)
        self.tokenizer: PreTrainedTokenizerBase | None = setup.load_tokenizer(model)
        self._tokenizing = ThreadPoolExecutor(
            1, thread_name_prefix="tokenize"
        )  # not every tokenizer can be used by two
        self._converting = ThreadPoolExecutor(1, thread_name_prefix="convert")
        ready = self._client.wait_ready()
        self.max_model_len, self.vocab_size = ready.max_model_len, int(hf_config.vocab_size)
        self.default_sampling_settings = ready.default_sampling_settings
        resolved = {
            "tokenizer": model.tokenizer or model.model,
            "dtype": getattr(torch, ready.dtype),
            "max_model_len": ready.max_model_len,
        }
        self.model_config = LoadedModelConfig(**vars(model) | resolved, hf_config=hf_config)
        self._processor = OutputProcessor(self.tokenizer, self.max_model_len)

    @classmethod
    def from_engine_args(
        cls, args: EngineConfigSource, *, max_queued_requests: int | None = None, timeouts: Timeouts = DEFAULT_TIMEOUTS
    ) -> AsyncLLM:
        """Start an engine with these arguments (see `EngineArgs`), as the constructor does."""
        return cls(args.create_engine_config(), max_queued_requests, timeouts)

    def __repr__(self) -> str:
        return f"AsyncLLM({self.config.model.model!r})"

    @property
    def is_running(self) -> bool:
        """Return whether an engine process is ready."""
        return self._client.pid is not None

    @property
    def engine_pid(self) -> int | None:
        """Return the id of the engine process; None while none is ready."""
        return self._client.pid

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._table)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer. Raises ValueError if the engine has none."""
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init=True): give token ids to generate()")
        return self.tokenizer

    async def generate(
        self,
        prompt: PromptType | ParsedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        deadline: float | None = None,
        tenant: str = "",
        call: str = "",
        weight: float = 1.0,
        max_store_bytes: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request until the finished one, each with what `output_kind` says. Closing the
        iterator early aborts the request.

        A request that is still running at `deadline` (seconds since the epoch) ends there with the finish reason
        "abort". Raises ValueError or TypeError for bad input, QueueFullError if too many requests wait, EngineDeadError
        if the engine process has died or dies, ShuttingDownError after `drain`, and DeadlineError if the deadline
        passes before the first token.

        Tenants take turns by their weights, and so do the calls of a tenant: requests with the same `call` are parts of
        one. The space of the chunk store is divided by weights, too, and a tenant keeps at most `max_store_bytes` in
        each tier.
        """
        arrival_time = time.time() if arrival_time is None else arrival_time
        owner = Owner(tenant, weight, max_store_bytes)
        request = await self._add(prompt, sampling_params, request_id, priority, arrival_time, deadline, owner, call)
        timer = None
        if deadline is not None:
            seconds = max(0.0, deadline - time.time())
            timer = asyncio.get_running_loop().call_later(seconds, self._expire, request)
        try:
            while True:
                output = await request.read()
                yield output
                if output.finished:
                    return
        finally:
            if timer is not None:
                timer.cancel()
            self._table.drop(request)

    def encode(self, *_: Any, **__: Any) -> None:
        """Refuse, as there are no pooling models."""
        raise ValueError("encode is not supported: there are no pooling models; use generate")

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests with what there is of them, and the finish reason "abort". Unknown ids are ignored."""
        self._table.abort([request_id] if isinstance(request_id, str) else list(request_id))

    async def check_health(self) -> None:
        """Raise EngineDeadError, saying why, unless the engine process is ready and does not hang."""
        self._client.check_health()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Run a method of `engine/process/calls.py` between two steps of the engine and return its result. Raises
        ValueError or TypeError for a method that is not there, the method's own error, or EngineDeadError."""
        return await asyncio.wrap_future(self._client.call(method, *arguments))

    async def get_metrics(self) -> list[Metric]:
        kinds = {"Counter": Counter, "Gauge": Gauge}
        return [kinds.get(kind, Metric)(name, value) for kind, name, value in await self.call("get_metrics")]

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes. Stored chunks stay."""
        await self.call("reset_prefix_cache")

    async def drain(self, timeout: float) -> None:
        """Take no more requests, wait for the requests and calls that run, and end those that still run after `timeout`
        seconds: requests with the finish reason "abort", calls by ShuttingDownError."""
        self._refuses = "the server is shutting down, and takes no more requests"
        stop = time.monotonic() + timeout
        while (len(self._table) or self._client.num_calls) and time.monotonic() < stop:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self._table.abort_all()
        self._client.fail_calls(ShuttingDownError("the engine is shutting down, and does not wait any longer"))

    def shutdown(self) -> None:
        """End the engine process when its chunk store is written, and wait for that. Requests that run raise
        ShuttingDownError. It does nothing the second time."""
        self._refuses = "the engine has been shut down"
        self._finalizer()
        self._tokenizing.shutdown(wait=False)
        self._converting.shutdown(wait=False)

    async def _add(
        self,
        prompt: PromptType | ParsedPrompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        arrival_time: float,
        deadline: float | None,
        owner: Owner,
        call: str,
    ) -> AsyncRequest:
        """Check a request and send it to the engine process."""
        tenant, weight, max_bytes = owner.name, owner.weight, owner.max_bytes
        self._check_arguments(params, request_id, deadline)
        if not (is_number(weight) and 0 < weight < math.inf):
            raise ValueError(f"weight={weight!r} must be a positive number")
        if not (max_bytes is None or (isinstance(max_bytes, int) and max_bytes > 0)):
            raise ValueError(f"max_store_bytes={max_bytes!r} must be a positive integer, or None")
        self.check_room(params.n, tenant)
        parsed = await self._parse(prompt)
        self._check(parsed, params, priority)
        self.check_room(params.n, tenant)  # others may have come while it was tokenized
        if request_id in self._table:
            raise ValueError(f"request_id {request_id!r} is in use: give every running request an id of its own")
        if deadline is not None and time.time() >= deadline:
            raise DeadlineError(f"the deadline of request {request_id!r} has passed before it was queued")
        number = next(self._numbers)
        request = AsyncRequest(
            number, request_id, parsed, params, arrival_time, self._processor, self._converting, tenant
        )
        # text, and with it the stop strings, is the affair of this process
        tokens_only, ids_only = copy(params), replace(parsed, text=None)
        tokens_only.stop, tokens_only.detokenize = [], False  # its fields have been checked, and may be long
        self._table.add(request)
        try:
            self._client.send(Add(number, request_id, ids_only, tokens_only, arrival_time, priority, owner, call))
        except BaseException:
            self._table.remove(request)
            raise
        return request

    async def _parse(self, prompt: PromptType | ParsedPrompt) -> ParsedPrompt:
        arguments = (prompt, self.tokenizer, self.vocab_size, self.max_model_len, self.config.model.trusted_chunks)
        if isinstance(prompt, ParsedPrompt) or num_characters(prompt) <= INLINE_CHARACTERS:
            return parse_prompt(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, parse_prompt, *arguments)

    def _check_arguments(self, params: SamplingParams, request_id: str, deadline: float | None) -> None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is {a_type(params)}: give SamplingParams")
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} must be a str, not {type(request_id).__name__}")
        if deadline is not None and not (is_number(deadline) and math.isfinite(deadline)):
            raise ValueError(f"deadline={deadline!r} must be a finite number of seconds since the epoch, or None")
        if params.logits_processors:
            raise ValueError(
                "logits_processors are functions of this process, and the engine runs in another: use logit_bias, "
                "allowed_token_ids or bad_words, or LLM.generate"
            )

    def _check(self, parsed: ParsedPrompt, params: SamplingParams, priority: int) -> None:
        """Raise ValueError or TypeError for what the engine would refuse, as far as this process can tell."""
        check_priority(priority, self.config.scheduler.policy)
        check_logprobs(params, self.config.model.max_logprobs, self.vocab_size)
        params.bind(self.tokenizer, self.vocab_size)
        check_length(parsed, self.max_model_len)
        check_chunk_settings(parsed, self.config.blend.enable_blending)

    def check_room(self, num_completions: int = 1, tenant: str = "") -> None:
        """Raise ShuttingDownError, EngineDeadError or QueueFullError if a tenant's request for this many
        completions could not be taken now. A tenant that has few is not refused because others have many."""
        if self._refuses is not None:
            raise ShuttingDownError(self._refuses)
        self._client.check_health()
        if self.max_queued_requests is None:
            return
        counts, limit = self._table.num_completions, self.config.scheduler.max_num_seqs + self.max_queued_requests
        if is_full(counts, tenant, num_completions, limit):
            unfinished = counts.total()
            seconds = self._table.retry_after(unfinished + num_completions - limit)
            raise QueueFullError(
                f"{unfinished} completions run or wait, and at most {limit} may (max_num_seqs="
                f"{self.config.scheduler.max_num_seqs} and max_queued_requests={self.max_queued_requests}): try again "
                f"in {seconds:.0f} seconds",
                seconds,
            )

    def _expire(self, request: AsyncRequest) -> None:
        """End a request whose deadline has come."""
        if not request.has_begun:
            late = time.time() - request.arrival_time
            request.fail(
                DeadlineError(f"request {request.request_id!r} had no token {late:.1f} seconds after its arrival")
            )
        self._table.abort([request.request_id])


def num_characters(prompt: Any) -> int:
    """Return how many characters a prompt has at least, valid or not."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, (list, tuple)):
        return sum(len(piece) for piece in prompt if isinstance(piece, str))
    if isinstance(prompt, dict):
        return sum(num_characters(piece) for piece in prompt.values())
    return 0
