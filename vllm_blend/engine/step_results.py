"""What a step that has been read means for its requests: tokens, blends, KV to keep, and errors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_blend.core.scheduler import ScheduledRequest, SchedulerOutput
from vllm_blend.engine.output_processor import RequestGroup
from vllm_blend.layers.sampler import SamplerOutput
from vllm_blend.request import Request
from vllm_blend.worker.model_runner import BlendResult, RunnerOutput

if TYPE_CHECKING:
    from vllm_blend.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)


class StepResults:
    """Hands the results of steps on, in the order in which these were queued."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.last_collected: list[int] = []  # the prompt whose KV `hack_kv` holds

    def process(self, scheduled: SchedulerOutput, result: RunnerOutput) -> list[RequestGroup]:
        """The groups of the requests that advanced or failed. Waits for the step's tokens."""
        touched: dict[RequestGroup, None] = {}
        for request, blend in result.blends.items():
            if request in self.engine.processor.groups:
                self.record_blend(request, blend)
        for request, error in result.errors.items():
            self._fail(request, error, touched)
        for item in scheduled.scheduled:
            request = item.request
            if request.finished:
                continue
            if request in result.prompt_logprobs:
                self.engine.processor.add_prompt_logprobs(request, item.start, result.prompt_logprobs[request])
            if request.collect_from is not None and item.start < request.num_prompt_tokens <= item.stop:
                self._collected(request)
        if result.tokens is not None:
            self._append_drawn(scheduled, result, result.tokens.result(), touched)
        return list(touched)

    def _append_drawn(
        self,
        scheduled: SchedulerOutput,
        result: RunnerOutput,
        tokens: SamplerOutput,
        touched: dict[RequestGroup, None],
    ) -> None:
        drafted = {item.request: item for item in scheduled.scheduled if item.drafts}
        row = 0
        for request in result.sampled:
            item = drafted.get(request)
            drafts = () if item is None else item.drafts
            rows = range(row, row + 1 + len(drafts))
            row = rows.stop
            request.num_in_flight -= 1
            if request.finished:
                continue
            touched[self.engine.processor.groups[request]] = None
            if self.engine.speculation is not None:
                rows = rows[: self.engine.speculation.verify(request, drafts, [tokens.token_ids[r] for r in rows])]
            self._append_rows(request, rows, tokens, item, touched)

    def _append_rows(
        self,
        request: Request,
        rows: range,
        tokens: SamplerOutput,
        item: ScheduledRequest | None,
        touched: dict[RequestGroup, None],
    ) -> None:
        """Add the tokens of these rows, up to the one that ends the request; `item` is given where it had drafts."""
        for index, row in enumerate(rows):
            if row in tokens.errors:
                self._fail(request, tokens.errors[row], touched)
                return
            self.engine.metrics.generation_tokens += 1
            ends = self.engine.processor.append_token(request, tokens.token_ids[row], tokens.logprobs[row])
            if item is not None and (ends or row == rows[-1]):
                self.engine.scheduler.accept(item, index)
            if ends:
                self.engine.finish(request, request.finish_reason or "stop")
                return

    def record_blend(self, request: Request, blend: BlendResult) -> None:
        """What a blend computed, for its user, the metrics and the hooks."""
        counts = self.engine.processor.record_blend(request, blend)
        if counts is not None:
            self.engine.metrics.count_blend(counts)
        plan = blend.plan
        self.engine.decoder.cache_fuse_metadata.update(
            imp_indices=blend.computed_with_suffix(),
            org_seq_len=plan.num_prompt_tokens,
            original_slot_mapping=blend.all_slots,
            our_slot_mapping=blend.computed_slots,
        )

    def _collected(self, request: Request) -> None:
        """The prompt of a request that keeps its KV is complete."""
        if request.params is None:
            self.engine.finish_encoding(request)
            return
        if request.output_token_ids:
            return
        kv = request.collected_kv().flatten(-2)  # [2, layers, tokens, kv_heads * head_dim]
        for layer, (k, v) in zip(self.engine.decoder.layers, zip(*kv, strict=True), strict=True):
            layer.self_attn.hack_kv = [k, v]
        self.last_collected = list(request.prompt_token_ids)
        request.collected.clear()
        request.collect_from = None

    def _fail(self, request: Request, error: str, touched: dict[RequestGroup, None]) -> None:
        if not request.finished:
            logger.warning("request %s failed: %s", request.request_id, error)
            request.error = error
            self.engine.finish(request, "error")
            touched[self.engine.processor.groups[request]] = None
