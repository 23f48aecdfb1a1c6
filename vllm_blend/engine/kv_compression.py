"""The compression of an engine's KV, from its settings and its parts; and what it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vllm_blend.checks import require
from vllm_blend.config import EngineConfig
from vllm_blend.core.scheduler import Scheduler, SchedulerOutput
from vllm_blend.engine.metrics import Gauge
from vllm_blend.kv_compress.compression_metrics import CompressionMetrics
from vllm_blend.kv_compress.config import CompressionSettings, KVCompressConfig
from vllm_blend.kv_compress.engine import Kept, KVCompressEngine
from vllm_blend.kv_compress.pages import HeadPagePool
from vllm_blend.kv_compress.scheduler import KVCompressScheduler, KVCompressSchedulerOutput
from vllm_blend.kv_compress.state import CompressionState
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.request import Request
from vllm_blend.worker.cache_engine import CacheEngine
from vllm_blend.worker.compressed_decode import CompressedDecode
from vllm_blend.worker.compressed_prefill import CompressedPrefill
from vllm_blend.worker.compressed_step import CompressedStep
from vllm_blend.worker.compression_hooks import PromptMetric

if TYPE_CHECKING:
    from vllm_blend.worker.worker import Worker


class KVCompression:
    """Compresses before a step is chosen, while no step is in flight.

    Then every earlier step has been queued, so what they wrote is what is moved; every later one is queued behind the
    moves; and the scheduler, which runs next, hands out pages that nobody reads any more. Between choosing a step and
    computing it, pages that the step was given would hold KVs yet to be written; after it, the step behind it may be
    queued already, with tables from before the moves. CUDA graphs hold no table: each replay is given the tables of its
    step, and what they name is where it was when the graph was made, in one cache.
    """

    def __init__(self, config: KVCompressConfig, worker: Worker, scheduler: Scheduler) -> None:
        runner, metric = worker.model_runner, config.make_metric()
        self.config, self.core, self.blocks = config, scheduler, scheduler.blocks
        self.cache_engine = CacheEngine(runner.cache)
        self.pool = HeadPagePool(self.blocks, worker.num_layers, worker.num_kv_heads)
        sizes = (worker.num_layers, worker.num_kv_heads, runner.cache.block_size, worker.max_model_len)
        most = worker.config.scheduler.max_num_seqs
        self.tables = scheduler.head_tables = HeadTables(self.pool, *sizes, worker.device, most)
        attentions = [layer.self_attn.attn for layer in runner.model.model.layers]  # type: ignore[union-attr]
        self.metrics = CompressionMetrics(metric, runner.cache.layers, self.cache_engine, attentions[0].scale)
        self.scheduler = KVCompressScheduler(config, self.tables, scheduler.max_num_batched_tokens)
        self.engine = KVCompressEngine(self.tables, self.cache_engine, config.allocation)
        step = CompressedStep(runner.model, self.cache_engine, runner.backend, metric)
        runner.compressed = CompressedDecode(step, self.tables, worker.capture_compressed(step))
        runner.compressed_prefill = CompressedPrefill(runner.model, self.cache_engine, self.tables, runner.backend)
        self.window = config.prefill_metric_collection_window_size if metric.watches else 0
        if metric.watches:
            runner.prompt_metric = PromptMetric(metric, self.window, [attention.rotary for attention in attentions])

    @classmethod
    def of(cls, config: EngineConfig, worker: Worker, scheduler: Scheduler) -> KVCompression | None:
        """None where nothing is compressed. Raises ValueError naming the setting for what cannot be."""
        options = config.kv_compress
        if not options.enable_kvc:
            return None
        attentions = [layer.self_attn.attn for layer in worker.model_runner.model.model.layers]  # type: ignore[union-attr]
        windows = sorted({a.sliding_window for a in attentions if a.sliding_window is not None})
        require(
            not windows,
            f"enable_kvc: the model has layers with a sliding window ({windows}), which look at positions that the "
            "order of KVs no longer tells once some have been evicted; leave enable_kvc out",
        )
        return cls(options, worker, scheduler)

    def begin(self, requests: Sequence[Request], settings: CompressionSettings) -> None:
        """New requests. Those that can never have anything evicted are left as they are."""
        for request in requests:
            longest = request.max_num_tokens
            if settings.evicts and (longest is None or settings.kept_tokens(longest) < longest):
                request.compression = CompressionState(settings, self.window)

    def may_run_ahead(self, sampled: Sequence[Request]) -> bool:
        """Whether the step after one in which these requests draw may be chosen without compressing anything first."""
        if self.scheduler.is_full:
            return False
        states = [request.compression for request in sampled if request.compression is not None]
        return not any(state.index is None or self.scheduler.is_due(state) for state in states)

    def launched(self, step: SchedulerOutput) -> None:
        """A step has been queued."""
        appending = (item for item in step.scheduled if item.request.in_head_pages and not item.is_blend)
        self.scheduler.step_taken(sum(item.num_tokens for item in appending))
        self._reserve()

    @torch.inference_mode()
    def run(self) -> None:
        """Compress what is to be compressed now."""
        for request in self.core.running:
            self._take_back(request)
        output = self.scheduler.run(self.core.running)
        self._evict(output)
        if output.adoptions:
            for kept in self.engine.choose(self.metrics, output.adoptions):
                self._adopt(kept)
        if self.scheduler.is_short(self.core.running):
            self._evict(self.scheduler.run(self.core.running, everybody=True))
        self._reserve()

    def _evict(self, output: KVCompressSchedulerOutput) -> None:
        if output.evictions:
            self.cache_engine.execute_cache_moves(self.engine.run(self.metrics, output))

    def _take_back(self, request: Request) -> None:
        """Slots that a step was to fill which failed before it was queued hold no KV that could be moved."""
        state = request.compression
        if state is None or state.index is None or request.awaits_blend:  # a blend is done again as a whole
            return
        if state.num_tokens > request.num_computed_tokens:
            self.tables.unappend(state.index, state.num_tokens - request.num_computed_tokens)
            state.num_tokens = request.num_computed_tokens

    def _reserve(self) -> None:
        """Pages for one more token of everybody in head pages, taken together: request by request it would take ten
        times as long. Where they are too few, the scheduler finds out who goes on."""
        states = [request.compression for request in self.core.running]
        self.tables.reserve([state.index for state in states if state is not None and state.index is not None])

    def _adopt(self, kept: Kept) -> None:
        """Have a request go on in head pages. Where these do not fit, others are compressed first; then the request
        that started last gives its pages back, as when a block is missing."""
        request = kept.adoption.request
        if request not in self.core.running:  # it has just given its pages back to one adopted before it
            return
        survivors = self.engine.gather(kept)
        if not self.engine.fits(kept, self._released_with(request)):
            self._evict(self.scheduler.run(self.core.running, everybody=True))
        # With all others gone, what it keeps fits in the blocks that it holds.
        while not self.engine.fits(kept, self._released_with(request)):
            self.core.preempt_last()
            if request not in self.core.running:
                return
        # Read, and so free to be given to whoever needs pages, this request first. Blocks that others share, or may
        # find again by their content, stay as they are.
        self.blocks.release(request.block_table)
        request.block_table = []
        self.engine.adopt(kept, survivors)

    def _released_with(self, request: Request) -> int:
        """Pages that the blocks of a request would become."""
        blocks = self.blocks.num_free_without(request.block_table) - self.blocks.num_free_blocks
        return blocks * self.pool.pages_per_block

    def gauges(self) -> list[Gauge]:
        return [
            Gauge("vllm_blend:kv_compressions", self.engine.num_compressions),
            Gauge("vllm_blend:kvs_evicted", self.engine.num_evicted),
            Gauge("vllm_blend:head_pages_freed", self.engine.num_freed),
            Gauge("vllm_blend:head_pages_used", self.pool.num_used_pages),
        ]
