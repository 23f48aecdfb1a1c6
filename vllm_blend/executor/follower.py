"""The other ranks' side of a step: the same requests and the same work, on their own heads."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from vllm_blend.blend.plan import BlendPlan, Segment
from vllm_blend.blend.selectors import Evidence, Look, Selector
from vllm_blend.core.step import ScheduledRequest, SchedulerOutput
from vllm_blend.executor.messages import (
    Errand,
    ItemMessage,
    PlanMessage,
    PrefillMessage,
    RequestUpdate,
    SelectorTraits,
    StepMessage,
    Tail,
)
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.model_runner import ModelRunner


class RemoteSelector(Selector):
    """A selector that rank 0 calls. This rank knows what it looks at, and takes part in that."""

    name = "remote"

    def __init__(self, traits: SelectorTraits) -> None:
        self._traits = traits
        self.looks_at = traits.looks_at  # type: ignore[misc]  # of this one, not of the class
        self.mean_shift = traits.mean_shift

    def score(self, evidence: Evidence) -> torch.Tensor:
        raise NotImplementedError("rank 0 scores for all ranks")

    def look(self, num_layers: int) -> Look:
        assert self._traits.look is not None
        return self._traits.look


class Follower:
    """Runs the steps that rank 0 tells of on `runner`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._requests: dict[int, Request] = {}
        self._kept: dict[int, ChunkKV] = {}

    def serve(self, link: Connection) -> None:
        """Run what comes from rank 0 through the connection until that end is closed."""
        while True:
            try:
                message = link.recv()
            except EOFError:
                return
            self.run(message)

    def run(self, message: StepMessage | PrefillMessage) -> None:
        """Do one message's work."""
        for errand in message.errands:
            self._run_errand(errand)
        if isinstance(message, StepMessage):
            items = [self._item(item) for item in message.items]
            self._runner.execute(SchedulerOutput(items, copies=message.copies))
        else:
            request = self._request(message.request)
            self._kept[message.kept_as] = self._runner.prefill_chunk(request, message.max_tokens)

    def _run_errand(self, errand: Errand) -> None:
        match errand:
            case ("keep", number, request):
                self._kept[number] = ChunkKV.collected(self._requests[request].collected_kv())
            case ("drop", number):
                del self._kept[number]
            case ("forget", number):
                self._runner.forget([self._requests.pop(number)])

    def _item(self, item: ItemMessage) -> ScheduledRequest:
        request = self._request(item.request)
        return ScheduledRequest(request, item.start, item.num_tokens, item.is_blend, item.drafts, item.part)

    def _request(self, update: RequestUpdate) -> Request:
        if update.new is not None:
            new = update.new
            params = SamplingParams(prompt_logprobs=new.prompt_logprobs) if new.draws else None
            self._requests[update.number] = Request(
                str(update.number),
                new.prompt_token_ids.tolist(),
                params,
                RequestMetrics(arrival_time=0.0),
                collect_from=new.collect_from,
            )
        request = self._requests[update.number]
        _apply(update.output, request.output_token_ids)
        request.num_in_flight = update.num_in_flight
        _apply(update.blocks, request.block_table)
        if update.collects_anew:
            request.collected.clear()
        if update.plan is not None:
            [plan] = update.plan
            request.blend = None if plan is None else self._plan(plan, request)
        return request

    def _plan(self, message: PlanMessage, request: Request) -> BlendPlan:
        return BlendPlan(
            tuple(Segment(start, self._kept[number], exact) for start, number, exact in message.segments),
            tuple(request.prompt_token_ids),
            message.suffix_start,
            RemoteSelector(message.selector),
            message.ratio,
            message.check_layers,
            message.shares,
        )


def _apply(tail: Tail, entries: list[int]) -> None:
    kept, following = tail
    entries[kept:] = following
