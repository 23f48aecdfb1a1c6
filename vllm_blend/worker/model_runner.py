"""One step on the device: build the batch, run the model over the active tokens, sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.blend.plan import BlendPlan
from vllm_blend.core.scheduler import ScheduledRequest, SchedulerOutput
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.transfer import StagingRing
from vllm_blend.layers.logprobs import MAX_ELEMENTS_AT_ONCE, prompt_logprobs
from vllm_blend.layers.sampler import PendingSample, Sampler, SamplingState
from vllm_blend.offload.attention import ExactBackend, QueryTap
from vllm_blend.offload.block_pool import HostBlockPool
from vllm_blend.ops.host_copy import HostCopy, to_device
from vllm_blend.outputs import Logprob
from vllm_blend.request import Request
from vllm_blend.worker.batch import NOTHING_DRAWN, Drawn, Span, build_batch
from vllm_blend.worker.blend_runner import first_positions
from vllm_blend.worker.cascade import CascadePlanner
from vllm_blend.worker.cascade_graphs import CascadeGraphs
from vllm_blend.worker.chunk_placement import ChunkPlacement
from vllm_blend.worker.compressed_decode import CompressedDecode
from vllm_blend.worker.compressed_prefill import CompressedPrefill
from vllm_blend.worker.compression_hooks import PromptMetric
from vllm_blend.worker.corrections import correction_hooks
from vllm_blend.worker.cuda_graphs import DecodeGraphs
from vllm_blend.worker.hooks import CaptureHook, NarrowingHook
from vllm_blend.worker.kv_cache import KVCache
from vllm_blend.worker.question_graphs import QuestionGraphs


@dataclass
class BlendResult:
    """What a blended prefill did: positions before the suffix that were computed in the last layer, and every slot."""

    plan: BlendPlan
    computed: torch.Tensor  # [n] int64, ascending, holes included
    all_slots: torch.Tensor  # [tokens] int64, of the rows active in the first layer; none of a blend in head pages
    computed_slots: torch.Tensor  # [m] int64, of the rows whose K and V the last layer computed; likewise
    # `computed` on its way to the host, queued with the step: counting it must not wait for a later one.
    computed_on_host: HostCopy = field(init=False)

    def __post_init__(self) -> None:
        self.computed_on_host = HostCopy(self.computed)

    def computed_with_suffix(self) -> torch.Tensor:
        """Return the ascending positions of the prompt that were computed in the last layer, int64."""
        suffix = torch.arange(self.plan.suffix_start, self.plan.num_prompt_tokens, device=self.computed.device)
        return torch.cat([self.computed, suffix])


@dataclass
class RunnerOutput:
    """Results of a step, by request. The tokens may still be on their way: reading them waits."""

    # requests that draw from rows of `tokens`: one row each, and one more for each of its drafts
    sampled: list[Request] = field(default_factory=list)
    tokens: PendingSample | None = None
    prompt_logprobs: dict[Request, list[dict[int, Logprob]]] = field(default_factory=dict)
    blends: dict[Request, BlendResult] = field(default_factory=dict)
    errors: dict[Request, str] = field(default_factory=dict)
    queries: QueryTap | None = None  # where a predictor of promotions looks at them


class ModelRunner:
    """Owns the model, its cache and its backend. Which tokens to run is decided elsewhere."""

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        backend: AttentionBackend,
        seed: int,
        decode_graphs: DecodeGraphs | None = None,
        staging: StagingRing | None = None,
        question_graphs: QuestionGraphs | None = None,
    ) -> None:
        self.model, self.cache, self.backend = model, cache, backend
        self.placement = ChunkPlacement(model, cache, staging)
        self.decode_graphs, self.question_graphs = decode_graphs, question_graphs
        self.sampler = Sampler(seed)
        self._drawn = NOTHING_DRAWN
        self.tapped_layers: Sequence[int] = ()  # whose queries a predictor of promotions looks at
        # In mode "exact": where chunks are attended that are not on the device. Such steps run without CUDA graphs.
        self.host_blocks: HostBlockPool | None = None
        self.cascade: CascadePlanner | None = None  # where shared pages are attended once
        self.cascade_graphs: CascadeGraphs | None = None
        self.compressed: CompressedDecode | None = None  # where requests may have head pages
        self.compressed_prefill: CompressedPrefill | None = None  # likewise
        self.prompt_metric: PromptMetric | None = None  # scores KVs by the last queries of their prompt

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute the scheduled tokens. Nothing of a request is read or written but its own pages.

        On a GPU this queues the work and returns: a token that the step before has drawn is read where it lies.
        """
        if output.copies:
            self._copy_blocks(output.copies)
        result = self._execute(output.scheduled)
        if any(item.drafts for item in output.scheduled):
            # Which of the rows count is found out on the host, and the next step waits for that.
            self._drawn = NOTHING_DRAWN
        elif result.tokens is not None:
            self._drawn = Drawn({request: row for row, request in enumerate(result.sampled)}, result.tokens.tokens)
        return result

    def _execute(self, items: Sequence[ScheduledRequest]) -> RunnerOutput:
        """Requests in head pages run beside the others, in a pass of their own; all draw together."""
        result = RunnerOutput()
        in_blocks = [item for item in items if not item.request.in_head_pages]
        in_head_pages = [item for item in items if item.request.in_head_pages]
        logits: list[torch.Tensor] = []
        states: list[SamplingState] = []
        if in_blocks:
            self._run(in_blocks, result, logits, states)
        for is_blend in (True, False):
            some = [item for item in in_head_pages if item.is_blend == is_blend]
            if some:
                hidden = self._prefill_in_head_pages(some, result) if is_blend else self._decode_in_head_pages(some)
                logits.append(self.model.compute_logits(hidden))  # type: ignore[operator]
                states += [state for item in some for state in _states(item)]
                result.sampled += [item.request for item in some]
        if logits:
            result.tokens = self.sampler.start(logits[0] if len(logits) == 1 else torch.cat(logits), states)
        return result

    def _decode_in_head_pages(self, items: Sequence[ScheduledRequest]) -> torch.Tensor:
        assert self.compressed is not None
        return self.compressed.run(items, self._drawn)

    def _prefill_in_head_pages(self, items: Sequence[ScheduledRequest], result: RunnerOutput) -> torch.Tensor:
        """Of prompts over compressed chunks: hidden states [requests, hidden_size] of their last tokens."""
        assert self.compressed_prefill is not None
        requests = [item.request for item in items]
        done = self.compressed_prefill.run(requests)
        result.errors |= {requests[index]: text for index, text in done.errors.items()}
        no_slots = torch.empty(0, dtype=torch.int64)  # in ordinary blocks
        for request, computed in zip(requests, done.computed, strict=True):
            assert request.blend is not None
            result.blends[request] = BlendResult(request.blend, computed, no_slots, no_slots)
        return done.hidden

    def _run(
        self,
        items: Sequence[ScheduledRequest],
        result: RunnerOutput,
        logits: list[torch.Tensor],
        states: list[SamplingState],
    ) -> None:
        """One pass over ordinary blocks; appends the logits that requests draw from, and their states."""
        missing = self._missing(items)
        watching = None if self.prompt_metric is None else self.prompt_metric.hook(items)
        decodes = watching is None and all(item.is_decode or item.drafts for item in items)
        if self.decode_graphs is not None and not missing and decodes:
            spans = [Span(item.request, item.start, item.stop, None, item.drafts) for item in items]
            replayed = None
            if self.cascade_graphs is not None and not any(item.drafts for item in items):
                replayed = self.cascade_graphs.run(spans, self._drawn)
            if replayed is None:
                replayed = self.decode_graphs.run(spans, self._drawn)
            if replayed is not None:
                logits.append(replayed)
                states += [state for item in items for state in _states(item)]
                result.sampled += [item.request for item in items]
                result.queries = self.decode_graphs.tap
                return
        arriving = self.placement.start([item.request for item in items if item.is_blend])
        spans, masses = self._spans(items, arriving, result)
        batch = build_batch(spans, self.cache.block_size, self.cache.key.device, self._drawn)
        capture = _capture_hook(items, self.cache.key.shape[0])
        narrowing = _narrowing_hook(spans, masses, self.cache.key.device)
        result.queries = QueryTap(self.tapped_layers) if self.tapped_layers else None
        own = (capture, narrowing, *correction_hooks(spans, self.placement.rotaries), result.queries, watching)
        hooks = [*arriving, *(hook for hook in own if hook is not None)]
        backend = self.backend
        if missing and self.host_blocks is not None:
            backend = ExactBackend(backend, self.cache.layers, self.host_blocks, missing)
        elif self.cascade is not None:
            backend = self.cascade.backend(backend, spans, batch.metadata)
        context = ForwardContext(batch.metadata, self.cache.layers, backend, hooks, _num_outputs(items))
        with forward_context(context):
            hidden = self.model(batch.input_ids)
        self._read_out(items, hidden, context.metadata, result, logits, states)
        for index, item in enumerate(items):
            request = item.request
            if capture is not None and index in capture.first_rows:
                request.collected[_first_row_position(item)] = capture.captured(index)
            if item.is_blend:
                result.blends[request] = _blend_result(request, batch.metadata, context.computed, index)
        if narrowing is not None:
            result.errors |= {items[index].request: text for index, text in narrowing.errors.items()}

    @torch.inference_mode()
    def prefill_chunk(self, request: Request, max_tokens: int) -> ChunkKV:
        """Compute the KV of the prompt of `request` from its `collect_from` on, at most `max_tokens` at a time, and
        sample nothing. Its block table must hold the prompt. Runs beside the scheduler's steps: between two of them, or
        behind one that is queued on a GPU."""
        request.collected.clear()
        while request.num_computed_tokens < request.num_prompt_tokens:
            count = min(max_tokens, request.num_prompt_tokens - request.num_computed_tokens)
            self._execute([ScheduledRequest(request, request.num_computed_tokens, count)])
            request.num_computed_tokens += count
        k, v = request.collected_kv().unbind(0)
        return ChunkKV(k.contiguous(), v.contiguous())

    def forget(self, requests: Sequence[Request]) -> None:
        """These requests have finished: hold nothing of theirs."""
        for request in requests:
            self._drawn.rows.pop(request, None)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks of all layers, (from, to) each: everything is read before anything is written."""
        sources, targets = to_device(torch.tensor(copies), self.cache.key.device).unbind(1)
        for pages in (self.cache.key, self.cache.value):
            pages[:, targets] = pages[:, sources]

    def _missing(self, items: Sequence[ScheduledRequest]) -> dict[int, list[int]]:
        """In mode "exact", the host blocks of the requests of a step that are not whole on the device."""
        if self.host_blocks is None:
            return {}
        tables = {i: item.request.residency.host_table() for i, item in enumerate(items) if item.request.residency}
        return {index: table for index, table in tables.items() if table}

    def _spans(
        self, items: Sequence[ScheduledRequest], arriving: Sequence[LayerHook], result: RunnerOutput
    ) -> tuple[list[Span], dict[Request, torch.Tensor]]:
        """And what the questions of blended requests have looked at, where they did."""
        blended = [item.request for item in items if item.is_blend]
        graphs = self.question_graphs
        starts, masses, errors = first_positions(blended, self.model, self.cache, self.backend, arriving, graphs)
        result.errors |= {blended[index]: text for index, text in errors.items()}
        positions = dict(zip(blended, starts, strict=True))
        where = [positions[item.request] if item.is_blend else None for item in items]
        spans = [Span(i.request, i.start, i.stop, at, i.drafts) for i, at in zip(items, where, strict=True)]
        return spans, {blended[index]: mass for index, mass in masses.items()}

    def _read_out(
        self,
        items: Sequence[ScheduledRequest],
        hidden: torch.Tensor,
        final: AttentionMetadata,
        result: RunnerOutput,
        logits: list[torch.Tensor],
        states: list[SamplingState],
    ) -> None:
        rows: list[int] = []
        for index, item in enumerate(items):
            params = item.request.params
            if params is not None and _wants_prompt_logprobs(item):
                assert params.prompt_logprobs is not None
                wanted = item.request.token_slice(item.start + 1, item.stop + 1)  # row i predicts token i + 1
                before = hidden[final.rows(index)]
                result.prompt_logprobs[item.request] = self._prompt_logprobs(before, wanted, params.prompt_logprobs)
            if item.samples:
                end = final.query_start_loc[index + 1]
                rows += range(end - 1 - len(item.drafts), end)
                states += _states(item)
                result.sampled.append(item.request)
        if rows:
            if len(rows) < hidden.shape[0]:
                hidden = hidden[to_device(torch.tensor(rows), hidden.device)]
            logits.append(self.model.compute_logits(hidden))  # type: ignore[operator]

    def _prompt_logprobs(
        self, hidden: torch.Tensor, token_ids: Sequence[int], num_logprobs: int
    ) -> list[dict[int, Logprob]]:
        """Entries for `token_ids`, each predicted by its row of hidden [at least as many, hidden_size]. A few rows at a
        time: the logits of a long prompt would take gigabytes that no profiling run has seen."""
        vocab_size: int = self.model.config.vocab_size  # type: ignore[union-attr,assignment]
        step = max(1, MAX_ELEMENTS_AT_ONCE // vocab_size)
        entries: list[dict[int, Logprob]] = []
        for start in range(0, len(token_ids), step):
            wanted = token_ids[start : start + step]
            logits = self.model.compute_logits(hidden[start : start + len(wanted)])  # type: ignore[operator]
            entries += prompt_logprobs(logits, wanted, num_logprobs)
        return entries


def _states(item: ScheduledRequest) -> list[SamplingState]:
    """Of the rows that a request draws from: after its last token, and after each draft."""
    state = item.request.sampling
    assert state is not None
    return [state.after(item.drafts[:count]) for count in range(len(item.drafts) + 1)]


def _wants_prompt_logprobs(item: ScheduledRequest) -> bool:
    request = item.request
    wanted = request.params is not None and request.params.prompt_logprobs is not None
    return wanted and item.start < request.num_prompt_tokens and not request.output_token_ids


def _num_outputs(items: Sequence[ScheduledRequest]) -> list[int]:
    """How many of each request's rows somebody wants the hidden states of: the last so many."""
    return [
        item.num_tokens if _wants_prompt_logprobs(item) else (1 + len(item.drafts) if item.samples else 0)
        for item in items
    ]


def _capture_hook(items: Sequence[ScheduledRequest], num_layers: int) -> CaptureHook | None:
    """Rows to keep of each request that wants any. Where KV is kept, a blend computes its suffix alone: no holes."""
    first = {
        index: max(0, item.request.collect_from - _first_row_position(item))
        for index, item in enumerate(items)
        if item.request.collect_from is not None and item.start < item.request.num_prompt_tokens
    }
    return CaptureHook(first, num_layers) if first else None


def _first_row_position(item: ScheduledRequest) -> int:
    return item.request.blend.suffix_start if item.is_blend and item.request.blend else item.start


def _narrowing_hook(
    spans: Sequence[Span], masses: dict[Request, torch.Tensor], device: torch.device
) -> NarrowingHook | None:
    plans = {
        index: (span.request.blend, span.positions, masses.get(span.request))
        for index, span in enumerate(spans)
        if span.positions is not None and span.request.blend is not None and span.request.blend.looks_at.checks
    }
    return NarrowingHook(plans, device) if plans else None


def _blend_result(request: Request, whole: AttentionMetadata, final: AttentionMetadata, index: int) -> BlendResult:
    plan = request.blend
    assert plan is not None
    rows = final.rows(index)
    after_context = request.num_tokens - plan.suffix_start  # rows are in order of position: these come last
    chosen = final.positions[rows][: rows.stop - rows.start - after_context]
    return BlendResult(plan, chosen, whole.slot_mapping[whole.rows(index)], final.slot_mapping[rows])
