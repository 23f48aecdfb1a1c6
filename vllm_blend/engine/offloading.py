"""The offloading of an engine, from its settings and its parts; and what it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_blend.checks import require
from vllm_blend.config import OffloadConfig
from vllm_blend.engine.metrics import Gauge
from vllm_blend.offload.block_pool import HostBlockPool
from vllm_blend.offload.controller import OffloadController
from vllm_blend.offload.copies import BlockCopies, PlainCopies, StreamCopies, ThreadCopies
from vllm_blend.offload.kv_cache_scheduler import DevicePool, KVCacheScheduler
from vllm_blend.offload.planner import MovePolicy, PlainPlanner, ThreadPlanner
from vllm_blend.offload.predictors import make_predictor
from vllm_blend.offload.promotion import ChunkScorer

if TYPE_CHECKING:
    from vllm_blend.worker.model_runner import ModelRunner

SCORED_PER_STEP = 2  # requests, where the host must keep ahead of the device: each costs it some twenty launches


def make_offload(
    config: OffloadConfig, runner: ModelRunner, blocks: DevicePool, runs_ahead: bool
) -> OffloadController | None:
    """None where chunks do not move. Raises ValueError naming the setting for what cannot be.

    An engine that runs ahead plans moves in a thread, and on a CPU copies in another. Any other does so at once: then
    the same prompt has the same placement in every run.
    """
    if config.mode is None:
        return None
    predictor = make_predictor(config.predictor)
    attentions = [layer.self_attn.attn for layer in runner.model.model.layers]  # type: ignore[union-attr]
    windows = sorted({a.sliding_window for a in attentions if a.sliding_window is not None})
    require(
        not windows,
        f"offload_mode={config.mode!r}: the model has layers with a sliding window ({windows}), which look at "
        "positions that a table without some of its blocks no longer tells; leave offload_mode out",
    )
    cache = runner.cache
    layers, _, block_size, kv_heads, head_dim = cache.key.shape
    on_gpu = cache.key.is_cuda
    budget = int(config.host_gib * 2**30)
    host = HostBlockPool(budget, layers, block_size, kv_heads, head_dim, cache.key.dtype, pinned=on_gpu)
    kind: type[BlockCopies] = StreamCopies if on_gpu else ThreadCopies if runs_ahead else PlainCopies
    policy = MovePolicy(config.resident_chunks, config.device_fraction, config.bytes_per_step)
    exact = config.mode == "exact"
    if exact:
        runner.host_blocks = host
    scorer = ChunkScorer(
        predictor,
        runner.tapped_layers,
        cache.layers,
        attentions[0].scale,
        2 * attentions[0].rotary.cos.shape[1],
        host if exact else None,
    )
    planner = ThreadPlanner(policy) if runs_ahead else PlainPlanner(policy)
    scheduler = KVCacheScheduler(blocks, host, kind(cache.key, cache.value, host), policy, planner)
    # Scores that come a step or two late change little; a step that waits for the host does.
    return OffloadController(scheduler, scorer, block_size, not exact, SCORED_PER_STEP if runs_ahead else None)


def offload_gauges(offload: OffloadController | None) -> list[Gauge]:
    if offload is None:
        return []
    scheduler = offload.scheduler
    return [
        Gauge("vllm_blend:chunk_promotions", scheduler.num_promotions),
        Gauge("vllm_blend:chunk_evictions", scheduler.num_evictions),
        Gauge("vllm_blend:offload_bytes_moved", scheduler.num_bytes),
        Gauge("vllm_blend:offload_moves_dropped", scheduler.num_dropped),
        Gauge("vllm_blend:offload_plans_dropped", scheduler.num_stale_plans),
        Gauge("vllm_blend:offload_host_blocks_free", scheduler.host.num_free_blocks),
    ]
