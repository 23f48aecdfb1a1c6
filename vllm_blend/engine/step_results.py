"""Enters the results of a step into its requests: tokens, blends, KV to keep, errors, counters."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_blend.attention.kv_scales import KVScales, scaled
from vllm_blend.core.step import ScheduledRequest, SchedulerOutput
from vllm_blend.engine.extension import Extension
from vllm_blend.engine.metrics import EngineMetrics
from vllm_blend.engine.output_processor import OutputProcessor
from vllm_blend.engine.requests import LiveRequests, RequestGroup
from vllm_blend.layers.sampler import SamplerOutput
from vllm_blend.request import Request, RequestStatus
from vllm_blend.worker.runner_output import BlendResult, RunnerOutput

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StepResults:
    """Hands the results of steps on, in the order in which these were queued. `decoder` is the decoder stack, which
    carries the public blending hooks."""

    requests: LiveRequests
    processor: OutputProcessor
    metrics: EngineMetrics
    extensions: list[Extension]
    decoder: Any
    last_collected: list[int] = field(default_factory=list)  # the prompt whose KV `hack_kv` holds

    def count_scheduled(self, scheduled: SchedulerOutput) -> None:
        """Count what requests of a new step found in pages that earlier ones have filled."""
        for item in scheduled.scheduled:
            retention = item.request.retention
            if retention is not None and not item.is_blend and item.start == retention.num_tokens:
                group = self.requests.groups[item.request]
                asked = self.requests.composer.planner.plan(group.parsed)
                if self.processor.record_retained(group, item.request, retention, asked):
                    self.metrics.count_found("retained", retention.num_tokens)
        for request in scheduled.admitted:
            if request.params is None:
                continue
            self.metrics.prompt_tokens += request.num_prompt_tokens
            if request.exact and self.requests.scheduler.blocks.enable_prefix_caching:
                self.metrics.prefix_cache_queries += request.num_prompt_tokens
                self.metrics.prefix_cache_hits += request.num_cached_tokens
                self.metrics.count_found("prefix_cache", request.num_cached_tokens)

    def process(self, scheduled: SchedulerOutput, result: RunnerOutput) -> list[RequestGroup]:
        """Wait for a step's tokens, and return the groups of the requests that advanced or failed."""
        touched: dict[RequestGroup, None] = {}
        for request, blend in result.blends.items():
            if request in self.requests.groups:
                self.record_blend(request, blend)
        for request, error in result.errors.items():
            self._fail(request, error, touched)
        for item in scheduled.scheduled:
            request = item.request
            if (request.collect_from is None and not result.prompt_logprobs) or request.finished:
                continue
            if request in result.prompt_logprobs:
                group = self.requests.groups[request]
                self.processor.add_prompt_logprobs(group, request, item.start, result.prompt_logprobs[request])
            if request.collect_from is not None and item.start < request.num_prompt_tokens <= item.stop:
                self._store_collected_kv(request)
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
        extensions = [each for each in self.extensions if type(each).verify is not Extension.verify]
        now = time.time()
        if not (drafted or extensions or tokens.errors):
            self._append_one_each(result.sampled, tokens, now, touched)
            return
        row = 0
        for request in result.sampled:
            item = drafted.get(request)
            drafts = () if item is None else item.drafts
            rows = range(row, row + 1 + len(drafts))
            row = rows.stop
            request.num_in_flight -= 1
            if request.finished:
                continue
            touched[self.requests.groups[request]] = None
            for extension in extensions:
                rows = rows[: extension.verify(request, drafts, [tokens.token_ids[r] for r in rows])]
            self._append_rows(request, rows, tokens, item, now, touched)

    def _append_one_each(
        self, sampled: Sequence[Request], tokens: SamplerOutput, now: float, touched: dict[RequestGroup, None]
    ) -> None:
        """Add a token to each request: what most steps do, in plain code."""
        groups, append, metrics = self.requests.groups, self.processor.append_token, self.metrics
        for request, token, logprobs in zip(sampled, tokens.token_ids, tokens.logprobs, strict=True):
            request.num_in_flight -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            touched[groups[request]] = None
            metrics.generation_tokens += 1  # one by one: a tokenizer may raise for a later request
            if append(request, token, logprobs, now):
                self.requests.finish(request, request.finish_reason or "stop")

    def _append_rows(
        self,
        request: Request,
        rows: range,
        tokens: SamplerOutput,
        item: ScheduledRequest | None,
        now: float,
        touched: dict[RequestGroup, None],
    ) -> None:
        """Add the tokens of these rows, up to the one that ends the request; `item` is given where it had drafts."""
        for index, row in enumerate(rows):
            if row in tokens.errors:
                self._fail(request, tokens.errors[row], touched)
                return
            self.metrics.generation_tokens += 1
            ends = self.processor.append_token(request, tokens.token_ids[row], tokens.logprobs[row], now)
            if item is not None and (ends or row == rows[-1]):
                self.requests.scheduler.accept(item, index)
            if ends:
                self.requests.finish(request, request.finish_reason or "stop")
                return

    def record_blend(self, request: Request, blend: BlendResult) -> None:
        """Enter what a blend computed, for its user, the metrics and the hooks."""
        counts = self.processor.record_blend(self.requests.groups[request], request, blend)
        if counts is not None:
            self.metrics.count_blend(counts)
        plan = blend.plan
        self.decoder.cache_fuse_metadata.update(
            imp_indices=blend.computed_with_suffix(),
            org_seq_len=plan.num_prompt_tokens,
            original_slot_mapping=blend.all_slots,
            our_slot_mapping=blend.computed_slots,
        )

    def _store_collected_kv(self, request: Request) -> None:
        """Store the KV of a request that keeps it, now that its prompt is complete."""
        if request.params is None:
            self.requests.finish_encoding(request)
            return
        if request.output_token_ids:
            return
        kv = request.collected_kv()
        for layer, (k, v) in zip(self.decoder.layers, zip(*kv, strict=True), strict=True):
            scales: KVScales | None = layer.self_attn.attn.kv_scales
            if scales is not None:
                k, v = scaled(k, scales.k), scaled(v, scales.v)
            layer.self_attn.hack_kv = [k.flatten(1), v.flatten(1)]
        self.last_collected = list(request.prompt_token_ids)
        request.collected.clear()
        request.collect_from = None

    def _fail(self, request: Request, error: str, touched: dict[RequestGroup, None]) -> None:
        if not request.finished:
            logger.warning("request %s failed: %s", request.request_id, error)
            request.error = error
            if request.blend is not None and request.retention is not None:  # its pages may hold a failed blend
                self.requests.scheduler.blocks.forget_retained(request.retention.key)
            self.requests.finish(request, "error")
            touched[self.requests.groups[request]] = None
