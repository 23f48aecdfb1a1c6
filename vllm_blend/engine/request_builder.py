"""Builds a group of requests from a prompt and its parameters, and makes every check that a new request has to pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.blend.metadata import check_one_thread, plan_from_old_kvs
from vllm_blend.blend.order import order_by_relevance
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.checks import is_whole
from vllm_blend.chunks.retention import RetentionKey, retention_key
from vllm_blend.config import EngineConfig
from vllm_blend.detokenizer import Detokenizer
from vllm_blend.engine.blend_planner import BlendPlanner
from vllm_blend.engine.extension import Extension
from vllm_blend.engine.requests import RequestGroup
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.keys import ModelFingerprint
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.layers.sampling_state import SamplingState, TokenLists
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.sampling_checks import check_n
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NewRequest:
    """The arguments of `LLMEngine.add_request`, with the prompt as token ids. `on_end` is called once, when the request
    has finished in any way. With `on_advance` no outputs are made: it is called, in mid-step, when there would be one.
    """

    request_id: str
    parsed: ParsedPrompt
    params: SamplingParams
    arrival_time: float | None = None
    final_only: bool = False
    priority: int = 0
    on_end: Callable[[], None] | None = None
    on_advance: Callable[[RequestGroup], None] | None = None
    owner: Owner = ANYONE
    call: str = ""


@dataclass(eq=False)
class RequestBuilder:
    """Checks new requests, and builds the group that serves each. It changes nothing of the engine."""

    config: EngineConfig
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: set[int]  # which the engine may add to
    max_model_len: int
    worker: Worker
    planner: BlendPlanner
    fingerprint: ModelFingerprint
    extensions: list[Extension]
    last_collected: Callable[[], list[int]] = field(repr=False)  # the prompt whose KV `hack_kv` holds
    _has_warned: bool = False

    @property
    def hooks(self) -> dict[str, Any]:
        """Return the public dict of blending hooks, which the decoder stack carries."""
        metadata: dict[str, Any] = self.worker.model_runner.model.model.cache_fuse_metadata
        return metadata

    def build(self, new: NewRequest, threads: Iterable[int]) -> RequestGroup:
        """Return a group for a new request. Raises ValueError or TypeError if it asks for what cannot be.

        `threads` are those that added the unfinished requests.
        """
        bad_words = self._check(new)
        parsed, params = new.parsed, new.params
        blends = self.planner.blends(parsed)
        if blends and parsed.order == "free":
            parsed = order_by_relevance(parsed)
        retention = self._retention_key(parsed, blends)
        hooks = self.hooks
        collects = bool(hooks.get("collect"))
        check_one_thread(hooks, threads)
        check_hooks_are_off(hooks, self.config.tensor_parallel_size)
        plan = self._plan_from_hooks(parsed) if not blends and hooks.get("check") else None
        if blends or plan is not None:
            check_nothing_needs_every_token(params, collects)
        metrics = RequestMetrics(arrival_time=time.time() if new.arrival_time is None else new.arrival_time)
        requests, token_ids = [], list(parsed.token_ids)  # which all completions share
        lists: TokenLists | None = None  # which all completions share
        for index, own in enumerate(params.for_completions()):
            longest = min(self.max_model_len, len(token_ids) + (own.max_tokens or self.max_model_len))
            request = Request(new.request_id, token_ids, own, metrics, index, longest, new.priority, parsed.salt)
            request.blend, request.retention = plan, retention
            request.owner, request.call = new.owner, new.call
            request.sampling = SamplingState(
                own, token_ids, request.output_token_ids, tuple(self.eos_token_ids), bad_words, shared=lists
            )
            lists = request.sampling.lists
            request.detokenizer = Detokenizer(self.tokenizer, own, token_ids)
            if collects and index == 0:
                request.collect_from = 0
            requests.append(request)
        ends, advances = new.on_end, new.on_advance
        return RequestGroup(new.request_id, parsed, metrics, requests, new.final_only, on_end=ends, on_advance=advances)

    def _check(self, new: NewRequest) -> list[tuple[int, ...]]:
        """Raise ValueError or TypeError for a bad request; return the token ids of its bad words."""
        parsed, params, blends = new.parsed, new.params, self.config.blend.enable_blending
        vocab_size = self.worker.hf_config.vocab_size
        check_priority(new.priority, self.config.scheduler.policy)
        check_logprobs(params, self.config.model.max_logprobs, vocab_size)
        check_n(params.n)  # its completions have n=1, so that their own checks do not see it
        bad_words = params.bind(self.tokenizer, vocab_size)
        check_length(parsed, self.max_model_len)
        check_chunk_settings(parsed, blends)
        for extension in self.extensions:
            extension.check(parsed, params)
        if parsed.chunk_bounds and not blends and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a prompt has chunks, but the engine does not blend: this prompt and later ones are computed whole, "
                "and no chunk is stored or reused; give enable_blending=True to the engine. This is said once"
            )
        return bad_words

    def _retention_key(self, parsed: ParsedPrompt, blends: bool) -> RetentionKey | None:
        """Return the key under which the pages of a prompt's context are retained; None if they are not."""
        if not self.config.blend.enable_blending:
            return None
        if not parsed.chunk_bounds:
            if parsed.blend_selector is not None or parsed.blend_recompute_ratio is not None:
                self.planner.plan(replace(parsed, token_ids=[0, 0], chunk_bounds=((0, 1),)))  # its settings must hold
            return None
        asked = self.planner.plan(parsed)  # its settings must hold, also where the prompt is too short to blend
        return retention_key(self.fingerprint, parsed, asked) if blends and parsed.retain is not False else None

    def _plan_from_hooks(self, parsed: ParsedPrompt) -> BlendPlan:
        worker = self.worker
        return plan_from_old_kvs(
            self.hooks,
            worker.model_runner.model.model.old_kvs,
            parsed.token_ids,
            worker.num_layers,
            worker.shape.kv_heads,
            worker.shape.head_dim,
            self.last_collected(),
            [attention.kv_scales for attention in attention_layers(worker.model_runner.model)],
        )


def check_hooks_are_off(hooks: dict[str, Any], num_ranks: int) -> None:
    """Raise ValueError for blending hooks that are on where ranks share the model: they are about the KV of all
    heads."""
    used = [name for name in ("collect", "check") if hooks.get(name)]
    if used and num_ranks > 1:
        raise ValueError(
            f"cache_fuse_metadata[{used[0]!r}] needs tensor_parallel_size=1, but it is {num_ranks}: give the prompt in "
            "chunks, with enable_blending=True, or set it to False"
        )


def check_priority(priority: int, policy: str) -> None:
    """Raise TypeError or ValueError for a priority that the scheduling policy cannot use."""
    if not is_whole(priority):
        raise TypeError(f"priority={priority!r} must be an integer, not {type(priority).__name__}")
    if priority and policy != "priority":
        raise ValueError(
            f"priority={priority}, but the engine serves requests in order of arrival: give "
            'scheduling_policy="priority" to the engine, or leave the priority out'
        )


def check_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Raise ValueError if more log-probabilities are asked for than the engine allows; -1 allows any number."""
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and 0 <= max_logprobs < (vocab_size if count == -1 else count):
            raise ValueError(f"{name}={count}, but the engine allows {max_logprobs}: lower it, or raise max_logprobs")


def check_length(parsed: ParsedPrompt, max_model_len: int) -> None:
    """Raise ValueError for a prompt so long that no token of an answer fits."""
    n = len(parsed.token_ids)
    if n >= max_model_len:
        raise ValueError(
            f"the prompt has {n} tokens, but max_model_len={max_model_len} must hold it and at least one "
            "more: shorten the prompt, or raise max_model_len where the model allows it"
        )


def check_chunk_settings(parsed: ParsedPrompt, blends: bool) -> None:
    """Raise ValueError for settings of a prompt's chunks that the engine would not read."""
    if not blends and (parsed.blend_selector is not None or parsed.blend_recompute_ratio is not None):
        raise ValueError(
            "the prompt has blend_selector or blend_recompute_ratio, but the engine does not blend: give "
            "enable_blending=True to the engine, or leave them out"
        )


def check_nothing_needs_every_token(params: SamplingParams, collects: bool) -> None:
    """Raise ValueError if a blended prompt is to give what only a prompt that is computed whole has."""
    if params.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs needs every prompt token computed, which a blend avoids: leave prompt_logprobs "
            "out, or give the prompt as plain text"
        )
    if collects:
        raise ValueError(
            "cache_fuse_metadata: collect and check (or a chunked prompt) exclude each other, as a blend does not "
            "compute the K and V of every prompt token: set collect to False first"
        )
