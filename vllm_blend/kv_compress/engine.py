"""From what is to be freed to which KVs go, and where those that stay are moved."""

from __future__ import annotations

import torch

from vllm_blend.kv_compress.compression_metrics import CompressionMetrics
from vllm_blend.kv_compress.config import Allocation
from vllm_blend.kv_compress.evictions import Evictions, schedule_evictions
from vllm_blend.kv_compress.moves import CacheMoves, schedule_moves
from vllm_blend.kv_compress.scheduler import Eviction, KVCompressSchedulerOutput
from vllm_blend.kv_compress.state import CompressionState
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.worker.cache_engine import CacheEngine, Survivors


class KVCompressEngine:
    """Carries out what `KVCompressScheduler` decides. Requests never change what others keep."""

    def __init__(self, tables: HeadTables, cache: CacheEngine, allocation: Allocation) -> None:
        self.tables, self.cache, self.allocation = tables, cache, allocation
        self.num_evicted = 0  # KVs
        self.num_freed = 0  # pages of single heads, not counting those that a prompt never got
        self.num_compressions = 0

    def run(self, metrics: CompressionMetrics, output: KVCompressSchedulerOutput) -> CacheMoves:
        """Evict from the requests in head pages, whose freed pages are the pool's from now on; what the cache is to
        move before anything is written to it."""
        every = [self._evict(metrics, eviction) for eviction in output.evictions]
        return CacheMoves(torch.cat([m.source for m in every]), torch.cat([m.target for m in every]))

    def gather(self, metrics: CompressionMetrics, adoption: Eviction) -> Survivors:
        """Read the KVs that stay of a prompt in ordinary blocks, which may be released then."""
        request, state = adoption.request, adoption.state
        device = self.cache.head_keys.device
        n = request.num_computed_tokens
        state.num_tokens = state.num_prompt_tokens = state.compressed_at = n
        scores = metrics.of_prompt(state, request.block_table, n)
        positions = torch.arange(n, device=device).expand(scores.shape)
        lengths = torch.full(scores.shape[:2], n, device=device)
        evictions = self._evictions(metrics.rank(scores, positions, state), positions, lengths, adoption)
        kept = ~evictions.evicted
        state.scores.clear()
        return self.cache.gather(torch.tensor(request.block_table, device=device), kept, scores, positions)

    def fits(self, survivors: Survivors, more_pages: int) -> bool:
        """Whether the pool, with so many more free pages, has pages for what was read."""
        needed = -(-survivors.lengths // self.tables.block_size)
        return int(needed.sum()) <= self.tables.pool.num_free_pages + more_pages

    def adopt(self, state: CompressionState, survivors: Survivors) -> None:
        """Write it to head pages. Raises OutOfBlocks, having changed nothing."""
        lengths = survivors.lengths.cpu().numpy()
        state.index = self.tables.open(lengths)
        self.cache.store(survivors, self.tables.slots_of(state.index))
        self._count(state, lengths.size * state.num_tokens - int(lengths.sum()), 0)

    def _evict(self, metrics: CompressionMetrics, eviction: Eviction) -> CacheMoves:
        state = eviction.state
        assert state.index is not None
        state.compressed_at = state.num_tokens
        slots = self.tables.slots_of(state.index)
        stored, positions = self.cache.read(slots)
        scores = stored if metrics.metric.watches else metrics.in_head_pages(slots, positions)
        lengths = torch.from_numpy(self.tables.lengths[state.index]).to(slots.device)
        evictions = self._evictions(metrics.rank(scores, positions, state), positions, lengths, eviction)
        moves, new_lengths = schedule_moves(evictions, lengths, slots)
        kept = new_lengths.cpu().numpy()
        evicted = int(self.tables.lengths[state.index].sum() - kept.sum())
        self._count(state, evicted, self.tables.shrink(state.index, kept))
        return moves

    def _evictions(
        self, rank: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, eviction: Eviction
    ) -> Evictions:
        settings, size = eviction.state.settings, self.tables.block_size
        protected_from = eviction.state.num_tokens - settings.protected_window_size
        limits = (eviction.num_pages, settings.num_sinks, protected_from, size, self.allocation)
        return schedule_evictions(rank, positions, lengths, *limits)

    def _count(self, state: CompressionState, evicted: int, freed: int) -> None:
        self.num_evicted += evicted
        self.num_freed += freed
        if evicted:
            state.num_compressions += 1
            self.num_compressions += 1
