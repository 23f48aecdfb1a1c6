"""From what is to be freed to which KVs go, and where those that stay are moved.

What is due at a time is worked out together, and the host waits for the device once for all of it: page tables are its
own, so it has to know how many KVs every head keeps, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vllm_blend.kv_compress.compression_metrics import CompressionMetrics
from vllm_blend.kv_compress.config import Allocation
from vllm_blend.kv_compress.evictions import SORTED_TOGETHER, schedule_evictions
from vllm_blend.kv_compress.moves import CacheMoves, num_moves, schedule_moves
from vllm_blend.kv_compress.scheduler import Eviction, KVCompressSchedulerOutput
from vllm_blend.kv_compress.state import CompressionState
from vllm_blend.kv_compress.tables import HeadTables
from vllm_blend.ops.host_copy import HostCopy, to_device
from vllm_blend.worker.cache_engine import CacheEngine, Survivors


@dataclass(frozen=True)
class Kept:
    """Which KVs stay of a prompt that is complete in ordinary blocks."""

    adoption: Eviction
    kept: torch.Tensor  # [L, H, n] bool
    scores: torch.Tensor  # [L, H, n] float32
    lengths: np.ndarray  # [L, H] int64, how many stay


class KVCompressEngine:
    """Carries out what `KVCompressScheduler` decides. Requests never change what others keep."""

    def __init__(self, tables: HeadTables, cache: CacheEngine, allocation: Allocation) -> None:
        self.tables, self.cache, self.allocation = tables, cache, allocation
        self.num_evicted = 0  # KVs
        self.num_freed = 0  # pages of single heads, not counting those that a prompt never got
        self.num_compressions = 0

    @property
    def device(self) -> torch.device:
        return self.cache.head_keys.device

    def run(self, metrics: CompressionMetrics, output: KVCompressSchedulerOutput) -> CacheMoves:
        """Evict from the requests in head pages, whose freed pages are the pool's from now on; what the cache is to
        move before anything is written to it."""
        every = [self._evict(metrics, together) for together in self._together(output.evictions)]
        return CacheMoves(torch.cat([m.source for m in every]), torch.cat([m.target for m in every]))

    def choose(self, metrics: CompressionMetrics, adoptions: Sequence[Eviction]) -> list[Kept]:
        """What stays of prompts that are complete in ordinary blocks."""
        chosen = []
        for adoption in adoptions:
            state, n = adoption.state, adoption.request.num_computed_tokens
            state.num_tokens = state.num_prompt_tokens = state.compressed_at = n
            scores = metrics.of_prompt(state, adoption.request.block_table, n)
            state.scores.clear()
            positions = torch.arange(n, device=self.device).expand(scores.shape)
            lengths = torch.full(scores.shape[:2], n, device=self.device)
            rank = metrics.rank(scores, positions, state)
            limits = (adoption.num_pages, state.settings.num_sinks, _protected_from(state))
            rule = (self.tables.block_size, self.allocation, metrics.metric.magnitude)
            evictions = schedule_evictions(rank, positions, lengths, *limits, *rule)
            chosen.append((adoption, ~evictions.evicted, scores))
        every = HostCopy(torch.stack([kept.sum(-1) for _, kept, _ in chosen])).wait().numpy()
        return [Kept(*choice, lengths) for choice, lengths in zip(chosen, every, strict=True)]

    def fits(self, kept: Kept, more_pages: int) -> bool:
        """Whether the pool, with so many more free pages, has pages for what stays."""
        needed = -(-kept.lengths // self.tables.block_size)
        return int(needed.sum()) <= self.tables.pool.num_free_pages + more_pages

    def gather(self, kept: Kept) -> Survivors:
        """Read what stays of a prompt out of its ordinary blocks, which may be released then."""
        table = to_device(torch.tensor(kept.adoption.request.block_table), self.device)
        positions = torch.arange(kept.kept.shape[-1], device=self.device)
        return self.cache.gather(table, kept.kept, kept.scores, positions, int(kept.lengths.sum()))

    def adopt(self, kept: Kept, survivors: Survivors) -> None:
        """Write it to head pages. Raises OutOfBlocks, having changed nothing."""
        state = kept.adoption.state
        state.index = self.tables.open(kept.lengths)
        self.cache.store(survivors, self.tables.slots_of(state.index))
        self._count(state, kept.lengths.size * state.num_tokens - int(kept.lengths.sum()))

    def _together(self, evictions: Sequence[Eviction]) -> Iterator[list[Eviction]]:
        """Requests that are sorted at a time: their heads are padded to the longest of all."""
        batch: list[Eviction] = []
        longest = 0
        for eviction in evictions:
            index = eviction.state.index
            assert index is not None
            most = max(longest, int(self.tables.lengths[index].max()))
            if batch and (len(batch) + 1) * most * self.tables.num_heads > SORTED_TOGETHER:
                yield batch
                batch, most = [], int(self.tables.lengths[index].max())
            batch.append(eviction)
            longest = most
        if batch:
            yield batch

    def _evict(self, metrics: CompressionMetrics, batch: Sequence[Eviction]) -> CacheMoves:
        states = [eviction.state for eviction in batch]
        indices = np.array([state.index for state in states])
        slots, lengths = self.tables.slots_of(indices), self.tables.lengths_of(indices)
        stored, positions = self.cache.read(slots)
        rank = self._ranks(metrics, states, slots, stored, positions)
        numbers = [(one.num_pages, one.state.settings.num_sinks, _protected_from(one.state)) for one in batch]
        pages, sinks, protected_from = to_device(torch.tensor(numbers), self.device).unbind(1)
        rule = (self.tables.block_size, self.allocation, metrics.metric.magnitude)
        evictions = schedule_evictions(rank, positions, lengths, pages, sinks, protected_from, *rule)
        new_lengths = evictions.new_lengths(lengths)
        known = torch.cat([new_lengths.reshape(-1), num_moves(evictions, new_lengths)[None]])
        on_host = HostCopy(known).wait().numpy()
        moves, _ = schedule_moves(evictions, lengths, slots, int(on_host[-1]))
        after = on_host[:-1].reshape(lengths.shape)
        before = self.tables.lengths[indices]
        self.num_freed += self.tables.shrink(indices, after)
        for state, evicted in zip(states, (before - after).sum((1, 2)).tolist(), strict=True):
            state.compressed_at = state.num_tokens
            self._count(state, evicted)
        return moves

    def _ranks(
        self,
        metrics: CompressionMetrics,
        states: Sequence[CompressionState],
        slots: torch.Tensor,
        stored: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """What eviction compares, [requests, L, H, n]. Each request is scored as if it were alone: a sum over more
        padding might round differently."""
        ranks = []
        n = slots.shape[-1]
        for i, state in enumerate(states):
            scores, at = stored[i], positions[i]
            if not metrics.keeps_scores:
                own = int(self.tables.lengths[state.index].max())
                scores = F.pad(metrics.in_head_pages(slots[i, ..., :own], at[..., :own]), (0, n - own))
            ranks.append(metrics.rank(scores, at, state))
        return torch.stack(ranks)

    def _count(self, state: CompressionState, evicted: int) -> None:
        self.num_evicted += evicted
        if evicted:
            state.num_compressions += 1
            self.num_compressions += 1


def _protected_from(state: CompressionState) -> int:
    return state.num_tokens - state.settings.protected_window_size
