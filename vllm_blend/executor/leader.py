"""Rank 0's side of what the ranks know in common: which requests and which KV the others have been told of."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_blend.blend.plan import BlendPlan
from vllm_blend.blend.selectors import LooksAt, Selector
from vllm_blend.core.step import SchedulerOutput
from vllm_blend.distributed.parts import ChunkParts
from vllm_blend.executor.messages import (
    Errand,
    ItemMessage,
    NewRequest,
    PlanMessage,
    PrefillMessage,
    RequestUpdate,
    SelectorTraits,
    StepMessage,
    Tail,
)
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.request import Request


@dataclass(eq=False)
class _Told:
    """A request as the other ranks know it."""

    number: int
    num_output_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    plan: BlendPlan | None = None


class Leader:
    """Makes the messages of steps. Requests and KV that are gone here are forgotten by the others with the next one."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._numbers = itertools.count()
        self._told: weakref.WeakKeyDictionary[Request, _Told] = weakref.WeakKeyDictionary()
        self._errands: deque[Errand] = deque()  # any thread may add some, when what it held last is freed

    def step(self, output: SchedulerOutput) -> StepMessage:
        """Return the message of a step."""
        items = [
            ItemMessage(
                self._update(item.request), item.start, item.num_tokens, item.is_blend, tuple(item.drafts), item.part
            )
            for item in output.scheduled
        ]
        return StepMessage(self._take_errands(), items, output.copies)

    def prefill(self, request: Request, max_tokens: int) -> tuple[PrefillMessage, ChunkParts]:
        """Return the message of a chunk that is computed at once, and what its KV here has to hold."""
        parts = self._new_parts()
        update = self._update(request)._replace(collects_anew=True)
        return PrefillMessage(self._take_errands(), update, max_tokens, parts.number), parts

    def keep_collected(self, request: Request, kv: ChunkKV) -> ChunkKV:
        """Return what a request has collected, `kv`, with the hold on what the others have collected of it."""
        parts = self._new_parts()
        self._errands.append(("keep", parts.number, self._told[request].number))
        return replace(kv, parts=parts)

    def _take_errands(self) -> list[Errand]:
        return [self._errands.popleft() for _ in range(len(self._errands))]

    def _new_parts(self) -> ChunkParts:
        parts = ChunkParts(next(self._numbers))
        weakref.finalize(parts, self._errands.append, ("drop", parts.number)).atexit = False
        return parts

    def _update(self, request: Request) -> RequestUpdate:
        told, new = self._told.get(request), None
        if told is None:
            told = self._told[request] = _Told(next(self._numbers))
            weakref.finalize(request, self._errands.append, ("forget", told.number)).atexit = False
            params = request.params
            logprobs = None if params is None else params.prompt_logprobs
            ids = np.asarray(request.prompt_token_ids, np.int64)
            new = NewRequest(ids, params is not None, logprobs, request.collect_from)
        output: Tail = (told.num_output_tokens, request.output_token_ids[told.num_output_tokens :])
        told.num_output_tokens = len(request.output_token_ids)
        blocks = _tail(told.blocks, request.block_table)
        told.blocks = list(request.block_table)
        plan: tuple[PlanMessage | None] | None = None
        if request.blend is not told.plan:
            told.plan = request.blend
            plan = (None if told.plan is None else self._plan_message(told.plan),)
        return RequestUpdate(told.number, new, output, request.num_in_flight, blocks, not request.collected, plan)

    def _plan_message(self, plan: BlendPlan) -> PlanMessage:
        segments = []
        for segment in plan.segments:
            assert segment.kv.parts is not None  # all KV of an engine with several ranks is computed by all of them
            segments.append((segment.start, segment.kv.parts.number, segment.exact))
        return PlanMessage(
            segments,
            plan.suffix_start,
            self._traits(plan.selector),
            plan.ratio,
            plan.check_layers,
            plan.shares,
        )

    def _traits(self, selector: Selector) -> SelectorTraits:
        look = selector.look(self._num_layers) if selector.looks_at is LooksAt.QUESTION else None
        return SelectorTraits(selector.looks_at, look, selector.mean_shift)


def _tail(told: Sequence[int], now: list[int]) -> Tail:
    """Return what has to be told of a list."""
    n = len(told)
    return (n, now[n:]) if now[:n] == told else (0, now)
