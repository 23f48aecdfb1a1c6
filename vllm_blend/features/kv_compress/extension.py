"""KV-Compress in the step loop: compression before a step is chosen, pages for the next token after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_blend.checks import require
from vllm_blend.core.scheduler import Scheduler
from vllm_blend.engine.extension import EngineParts, Extension, Step
from vllm_blend.engine.metrics import Gauge, Metric
from vllm_blend.features.kv_compress.compression_metrics import CompressionMetrics
from vllm_blend.features.kv_compress.config import KVCompressConfig
from vllm_blend.features.kv_compress.engine import Adoption, KVCompressEngine
from vllm_blend.features.kv_compress.pages import HeadPagePool
from vllm_blend.features.kv_compress.passes import CompressionPasses
from vllm_blend.features.kv_compress.scheduler import KVCompressScheduler, KVCompressSchedulerOutput
from vllm_blend.features.kv_compress.state import COMPRESSION, CompressionState, in_head_pages
from vllm_blend.features.kv_compress.tables import HeadTables
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.request import Request
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.worker.worker import Worker


@dataclass(frozen=True)
class NoCompression(Extension):
    """The feature, switched off: it refuses requests that ask for it."""

    config: KVCompressConfig

    def check(self, parsed: ParsedPrompt, params: SamplingParams) -> None:
        self.config.settings_of(params.compression)


class KVCompression(Extension):
    """Compresses before a step is chosen, while no step is in flight.

    Then every earlier step has been queued, so what they wrote is what is moved; every later one is queued behind the
    moves; and the scheduler, which runs next, hands out pages that are not read any more. Between choosing a step and
    computing it, pages that the step was given would hold KVs yet to be written; after it, the step behind it may be
    queued already, with tables from before the moves. CUDA graphs hold no table: each replay is given the tables of its
    step, and what they name is where it was when the graph was made, in one cache.
    """

    def __init__(self, config: KVCompressConfig, worker: Worker, scheduler: Scheduler) -> None:
        runner, passes = worker.model_runner, worker.extension(CompressionPasses)
        self.config, self.core, self.blocks = config, scheduler, scheduler.blocks
        self.cache_engine = passes.cache_engine
        self.pool = HeadPagePool(self.blocks, worker.num_layers, worker.shape.kv_heads)
        sizes = (worker.num_layers, worker.shape.kv_heads, runner.cache.block_size, worker.max_model_len)
        most = worker.config.scheduler.max_num_seqs
        self.tables = HeadTables(self.pool, *sizes, worker.device, most)
        attentions = attention_layers(runner.model)
        metrics = CompressionMetrics(passes.metric, runner.cache.layers, self.cache_engine, attentions[0].scale)
        self.scheduler = KVCompressScheduler(config, self.tables, scheduler.max_num_batched_tokens)
        self.engine = KVCompressEngine(self.tables, metrics, config.allocation)
        self.window = passes.window

    def check(self, parsed: ParsedPrompt, params: SamplingParams) -> None:
        self.config.settings_of(params.compression)

    def begin(self, requests: Sequence[Request], parsed: ParsedPrompt, params: SamplingParams) -> None:
        """Prepare new requests. Those that can never have anything evicted are left as they are."""
        settings = self.config.settings_of(params.compression)
        for request in requests:
            longest = request.max_num_tokens
            if settings.evicts and (longest is None or settings.kept_tokens(longest) < longest):
                COMPRESSION.set(request, CompressionState(settings, self.window))
                # The queries that an eviction metric looks at are computed.
                request.min_computed_tokens = max(1, self.window)

    def before_schedule(self, running: Sequence[Request], ahead: bool) -> None:
        if not ahead:
            self.run()

    def may_run_ahead(self, step: Step, running: Sequence[Request]) -> bool:
        """Return whether the step after `step` may be chosen without compressing anything first."""
        if self.scheduler.is_full:
            return False
        states = [state for state in map(COMPRESSION.get, step.result.sampled) if state is not None]
        return not any(state.index is None or self.scheduler.is_due(state) for state in states)

    def released(self, request: Request) -> None:
        """Begin again with a request that is about to return its pages."""
        state = COMPRESSION.get(request)
        if state is not None:
            state.reset()

    def launched(self, step: Step) -> None:
        """Count what a step appends, and take pages for the token after it."""
        appending = (item for item in step.scheduled.scheduled if in_head_pages(item.request))
        self.scheduler.count_new_tokens(sum(item.num_tokens for item in appending))
        self._reserve()

    @torch.inference_mode()
    def run(self) -> None:
        """Compress what is to be compressed now."""
        self.core.send_back([request for request in self.core.running if not self._take_back(request)])
        output = self.scheduler.schedule(self.core.running)
        self._evict(output)
        if output.prompts:
            for adoption in self.engine.choose(output.prompts):
                self._adopt(adoption)
        if self.scheduler.is_short(self.core.running):
            self._evict(self.scheduler.schedule(self.core.running, compress_all=True))
        self._reserve()

    def _evict(self, output: KVCompressSchedulerOutput) -> None:
        if output.evictions:
            self.cache_engine.execute_cache_moves(self.engine.evict(output))

    def _take_back(self, request: Request) -> bool:
        """Drop the slots that a step was to fill, if it failed before it was queued: they hold no KV. Return False if
        it has changed sums of attention, which cannot be taken back: the request has to start again."""
        state = COMPRESSION.get(request)
        if state is None or state.index is None:
            return True
        if state.num_tokens > request.num_computed_tokens:
            self.tables.unappend(state.index, state.num_tokens - request.num_computed_tokens)
            state.num_tokens = request.num_computed_tokens
        return state.num_summed <= state.num_tokens

    def _reserve(self) -> None:
        """Take pages for one more token of all requests in head pages together: one by one it would take ten times as
        long. If they are too few, the scheduler decides which requests go on."""
        states = map(COMPRESSION.get, self.core.running)
        self.tables.reserve([state.index for state in states if state is not None and state.index is not None])

    def _adopt(self, adoption: Adoption) -> None:
        """Move a request to head pages. If too few are free, others are compressed first; then the request that started
        last returns its pages, as when a block is missing."""
        request = adoption.eviction.request
        if request not in self.core.running:  # it has just been preempted for one adopted before it
            return
        survivors = self.engine.gather(adoption)
        if not self.engine.fits(adoption, self._released_with(request)):
            self._evict(self.scheduler.schedule(self.core.running, compress_all=True))
        # With all others gone, what it keeps fits in the blocks that it holds.
        while not self.engine.fits(adoption, self._released_with(request)):
            self.core.preempt_last()
            if request not in self.core.running:
                return
        # The blocks have been read, so their space may be used again. Those that others share, or may find again by
        # their content, stay as they are.
        assert request.pages is not None
        request.pages.release()
        self.engine.adopt(adoption, survivors)

    def _released_with(self, request: Request) -> int:
        """Return how many head pages the blocks of a request would become."""
        blocks = self.blocks.num_free_without(request.block_table) - self.blocks.num_free_blocks
        return blocks * self.pool.pages_per_block

    def gauges(self) -> list[Metric]:
        return [
            Gauge("vllm_blend:kv_compressions", self.engine.num_compressions),
            Gauge("vllm_blend:kvs_evicted", self.engine.num_evicted),
            Gauge("vllm_blend:head_pages_freed", self.engine.num_freed),
            Gauge("vllm_blend:head_pages_used", self.pool.num_used_pages),
        ]


def make_compression(config: KVCompressConfig, parts: EngineParts) -> Extension:
    """Return the feature as the engine's configuration asks for it. Raises ValueError naming the setting for what
    cannot be compressed."""
    if not config.is_on:
        return NoCompression(config)
    attentions = attention_layers(parts.worker.model_runner.model)
    windows = sorted({a.sliding_window for a in attentions if a.sliding_window is not None})
    require(
        not windows,
        f"enable_kvc: the model has layers with a sliding window ({windows}), which look at positions that the "
        "order of KVs no longer tells once some have been evicted; leave enable_kvc out, or set max_model_len to the "
        "shortest of them or less",
    )
    require(
        all(attention.sinks is None for attention in attentions),
        "enable_kvc: the model has attention sinks, which the sums of attention that KVs are ranked by do not know; "
        "leave enable_kvc out",
    )
    return KVCompression(config, parts.worker, parts.scheduler)
