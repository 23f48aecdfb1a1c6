"""The pass over requests in ordinary blocks: prefills, blends and decodes, together in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.blend.selectors import LooksAt
from vllm_blend.core.step import ScheduledRequest, all_decode
from vllm_blend.kv_store.transfer import StagingRing
from vllm_blend.layers.logprobs import prompt_logprobs
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.sampling import MAX_ELEMENTS_AT_ONCE
from vllm_blend.outputs import Logprob
from vllm_blend.request import Request
from vllm_blend.worker.batch import Batch, Drawn, Span, build_batch
from vllm_blend.worker.blend_runner import first_positions
from vllm_blend.worker.chunk_placement import ChunkPlacement
from vllm_blend.worker.cuda_graphs import DecodeGraphs
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.hooks import CaptureHook, NarrowingHook
from vllm_blend.worker.kv_cache import KVCache
from vllm_blend.worker.mean_shift import mean_shift_hook
from vllm_blend.worker.passes import PassOutput, WorkerExtension
from vllm_blend.worker.question_graphs import QuestionGraphs
from vllm_blend.worker.runner_output import BlendResult, RunnerOutput
from vllm_blend.worker.step_graphs import StepGraphs


class Graphs(NamedTuple):
    """The passes over blocks that are replayed as CUDA graphs; None for those that are not."""

    decode: DecodeGraphs | None = None
    question: QuestionGraphs | None = None
    step: StepGraphs | None = None


NO_GRAPHS = Graphs()


class BlockPass:
    """Runs the model over requests in blocks, by a CUDA graph where one fits."""

    def __init__(
        self,
        parts: DeviceParts,
        graphs: Graphs = NO_GRAPHS,
        staging: StagingRing | None = None,
        extensions: Sequence[WorkerExtension] = (),
    ) -> None:
        self.parts, self.model, self.cache = parts, parts.model, parts.cache
        self.extensions = extensions
        self.decode_graphs, self.question_graphs, self.step_graphs = graphs
        self.placement = ChunkPlacement(parts.model, parts.cache, staging)

    def accepts(self, item: ScheduledRequest) -> bool:
        """Return True: what no other pass accepts is in blocks."""
        return True

    def run(self, items: Sequence[ScheduledRequest], drawn: Drawn, result: RunnerOutput) -> PassOutput | None:
        """Compute the items, and add what blends and prompts give to `result`."""
        if self.decode_graphs is not None and all_decode(items):
            hidden = self._replay(self.decode_graphs, items, drawn)
            if hidden is not None:
                return PassOutput(self.model.compute_logits(hidden), items)
        return self._forward(items, drawn, result)

    def _replay(
        self, decode_graphs: DecodeGraphs, items: Sequence[ScheduledRequest], drawn: Drawn
    ) -> torch.Tensor | None:
        if any(extension.needs_eager(items) for extension in self.extensions):
            return None
        spans = [Span(item.request, item.start, item.start + item.num_tokens, None, item.drafts) for item in items]
        for extension in self.extensions:
            hidden = extension.replay(spans, drawn)
            if hidden is not None:
                return hidden
        return decode_graphs.run(spans, drawn)

    def _forward(self, items: Sequence[ScheduledRequest], drawn: Drawn, result: RunnerOutput) -> PassOutput | None:
        arriving = self.placement.start([item.request for item in items if item.starts_blend])
        spans = self._spans(items, arriving, result)
        batch = build_batch(spans, self.cache.block_size, self.parts.device, drawn)
        capture = _capture_hook(items, self.cache)
        narrowing = _narrowing_hook(spans, self.parts)
        own = (capture, narrowing, mean_shift_hook(spans, self.placement.rotaries))
        added = (extension.hook(items) for extension in self.extensions)
        hooks = [*arriving, *(hook for hook in (*own, *added) if hook is not None)]
        backend = self.parts.backend
        for extension in self.extensions:
            backend = extension.wrap_backend(backend, spans, batch.metadata)
        hidden, final, computed = self._run_model(items, batch, backend, hooks)
        output = self._read_out(items, hidden, final, result)
        for index, item in enumerate(items):
            request = item.request
            if capture is not None and index in capture.first_rows:
                request.collected[_first_row_position(item)] = capture.captured(index)
            if item.is_blend and item.part is None:
                result.blends[request] = _blend_result(request, batch.metadata, computed, index)
            elif item.part is not None and item.part.is_last:
                result.blends[request] = self._divided_result(request)
        if narrowing is not None:
            result.errors |= {items[index].request: text for index, text in narrowing.errors.items()}
        return output

    def _run_model(
        self, items: Sequence[ScheduledRequest], batch: Batch, backend: AttentionBackend, hooks: Sequence[LayerHook]
    ) -> tuple[torch.Tensor, AttentionMetadata, AttentionMetadata]:
        """Return the hidden states [rows, hidden_size] of a step, the metadata of these rows, and that of the rows
        whose K and V the last layer computed."""
        if self.step_graphs is not None and not hooks and backend is self.parts.backend:
            replayed = self.step_graphs.run(batch)
            if replayed is not None:
                return replayed, batch.metadata, batch.metadata
        context = ForwardContext(batch.metadata, self.cache.layers, backend, hooks, _num_outputs(items))
        with forward_context(context):
            hidden = self.model(batch.input_ids)
        return hidden, context.metadata, context.computed

    def _spans(
        self, items: Sequence[ScheduledRequest], arriving: Sequence[LayerHook], result: RunnerOutput
    ) -> list[Span]:
        """Return the spans of a step, for which selectors have chosen."""
        blended = [item.request for item in items if item.starts_blend]
        starts, errors = first_positions(blended, self.parts, arriving, self.question_graphs)
        result.errors |= {blended[index]: text for index, text in errors.items()}
        positions = dict(zip(blended, starts, strict=True))
        return [_span(item, positions.get(item.request)) for item in items]

    def _divided_result(self, request: Request) -> BlendResult:
        """Return the result of a blend whose last part has been computed."""
        plan, positions, size = request.blend, request.blend_positions, self.cache.block_size
        assert plan is not None and positions is not None
        table = torch.tensor(request.block_table)
        slots = to_device(table[positions // size] * size + positions % size, self.parts.device)
        before_suffix = positions[: len(positions) - (request.num_tokens - plan.suffix_start)]
        return BlendResult(plan, to_device(before_suffix, self.parts.device), slots, slots)

    def _read_out(
        self,
        items: Sequence[ScheduledRequest],
        hidden: torch.Tensor,
        final: AttentionMetadata,
        result: RunnerOutput,
    ) -> PassOutput | None:
        """Return the logits of the items that draw, and add the log-probabilities of prompts to `result`."""
        rows: list[int] = []
        sampling: list[ScheduledRequest] = []
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
                sampling.append(item)
        if not rows:
            return None
        if len(rows) < hidden.shape[0]:
            hidden = hidden[to_device(torch.tensor(rows), hidden.device)]
        return PassOutput(self.model.compute_logits(hidden), sampling)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, token_ids: Sequence[int], num_logprobs: int
    ) -> list[dict[int, Logprob]]:
        """Return entries for `token_ids`, each predicted by its row of hidden [at least as many, hidden_size]. Few rows
        are done at a time: the logits of a long prompt would take gigabytes that no profiling run has seen."""
        vocab_size: int = self.model.config.vocab_size
        step = max(1, MAX_ELEMENTS_AT_ONCE // vocab_size)
        entries: list[dict[int, Logprob]] = []
        for start in range(0, len(token_ids), step):
            wanted = token_ids[start : start + step]
            logits = self.model.compute_logits(hidden[start : start + len(wanted)])
            if self.parts.heads.ranks.leads:  # which has all of them
                entries += prompt_logprobs(logits, wanted, num_logprobs)
        return entries


def _span(item: ScheduledRequest, chosen: torch.Tensor | None) -> Span:
    """Return the span of an item; `chosen` [n] int64 are the positions of a blend that starts.

    Where a blend is divided, the host has to know which positions come first, and waits for the device to choose them.
    """
    request, part = item.request, item.part
    if part is None:
        return Span(request, item.start, item.stop, chosen, item.drafts)
    if chosen is not None:
        request.blend_positions = chosen.cpu()
    assert request.blend_positions is not None
    # A selector that failed chose nothing: until its request ends, parts that were queued ahead have its last row.
    first = min(part.first, len(request.blend_positions) - 1)
    positions = request.blend_positions[first : part.stop]
    return Span(request, item.start, int(positions[-1]) + 1, positions)


def _wants_prompt_logprobs(item: ScheduledRequest) -> bool:
    request = item.request
    wanted = request.params is not None and request.params.prompt_logprobs is not None
    return wanted and item.start < request.num_prompt_tokens and not request.output_token_ids


def _num_outputs(items: Sequence[ScheduledRequest]) -> list[int]:
    """Return of how many of each request's rows the hidden states are needed: the last so many."""
    return [
        item.num_tokens if _wants_prompt_logprobs(item) else (1 + len(item.drafts) if item.samples else 0)
        for item in items
    ]


def _capture_hook(items: Sequence[ScheduledRequest], cache: KVCache) -> CaptureHook | None:
    """Return the hook that keeps rows of the requests whose KV is collected. There, a blend computes its suffix alone:
    no holes."""
    first = {
        index: max(0, item.request.collect_from - _first_row_position(item))
        for index, item in enumerate(items)
        if item.request.collect_from is not None and item.start < item.request.num_prompt_tokens
    }
    # Chunks are kept in the dtype of the pages, what a user's hooks have asked for in the model's.
    chunks = {index: cache.key.dtype for index in first if items[index].request.params is None}
    return CaptureHook(first, len(cache.layers), chunks) if first else None


def _first_row_position(item: ScheduledRequest) -> int:
    return item.request.blend.suffix_start if item.is_blend and item.request.blend else item.start


def _narrowing_hook(spans: Sequence[Span], parts: DeviceParts) -> NarrowingHook | None:
    plans = {
        index: (plan, span.positions)
        for index, span in enumerate(spans)
        if span.positions is not None and (plan := span.request.blend) and plan.looks_at is LooksAt.LAYERS
    }
    return NarrowingHook(plans, parts.device, parts.heads) if plans else None


def _blend_result(request: Request, whole: AttentionMetadata, final: AttentionMetadata, index: int) -> BlendResult:
    plan = request.blend
    assert plan is not None
    rows = final.rows(index)
    after_context = request.num_tokens - plan.suffix_start  # rows are in order of position: these come last
    chosen = final.positions[rows][: rows.stop - rows.start - after_context]
    return BlendResult(plan, chosen, whole.slot_mapping[whole.rows(index)], final.slot_mapping[rows])
