"""Choose which KVs go so that pages become free, and move those that stay.

All requests that are due at a time are worked out together, and the host waits for the device once for all of them: it
owns the page tables, so it must know how many KVs every head keeps, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from vllm_blend.features.kv_compress.cache_engine import Survivors
from vllm_blend.features.kv_compress.compression_metrics import CompressionMetrics
from vllm_blend.features.kv_compress.config import Allocation
from vllm_blend.features.kv_compress.evictions import SORTED_TOGETHER, schedule_evictions
from vllm_blend.features.kv_compress.moves import CacheMoves, num_moves, schedule_moves
from vllm_blend.features.kv_compress.scheduler import Eviction, KVCompressSchedulerOutput
from vllm_blend.features.kv_compress.state import CompressionState, HeadPageTable
from vllm_blend.features.kv_compress.tables import HeadTables
from vllm_blend.ops.host_copy import HostCopy, to_device


@dataclass(frozen=True)
class Adoption:
    """A prompt that moves from ordinary blocks to head pages, and which of its KVs stay."""

    eviction: Eviction
    kept: torch.Tensor  # [L, H, n] bool
    scores: torch.Tensor  # [L, H, n] float32
    lengths: np.ndarray  # [L, H] int64, how many stay


class KVCompressEngine:
    """Carries out what `KVCompressScheduler` decides. A request never affects what others keep."""

    def __init__(self, tables: HeadTables, metrics: CompressionMetrics, allocation: Allocation) -> None:
        self.tables, self.metrics, self.cache, self.allocation = tables, metrics, metrics.pages, allocation
        self.num_evicted = 0  # KVs
        self.num_freed = 0  # head pages, not counting those that a prompt never took
        self.num_compressions = 0

    @property
    def device(self) -> torch.device:
        return self.cache.head_keys.device

    def evict(self, output: KVCompressSchedulerOutput) -> CacheMoves:
        """Evict from requests in head pages, whose freed pages return to the pool. Return what the cache must move
        before anything is written to it."""
        every = [self._evict(together) for together in self._together(output.evictions)]
        return CacheMoves(torch.cat([m.source for m in every]), torch.cat([m.target for m in every]))

    def choose(self, prompts: Sequence[Eviction]) -> list[Adoption]:
        """Choose which KVs stay of prompts that are complete in ordinary blocks."""
        chosen, metrics = [], self.metrics
        for prompt in prompts:
            state, n = prompt.state, prompt.request.num_computed_tokens
            state.num_tokens = state.num_prompt_tokens = state.compressed_at = n
            scores = metrics.prompt_scores(state, prompt.request.block_table, n)
            state.scores.clear()
            state.queries.clear()
            positions = torch.arange(n, device=self.device).expand(scores.shape)
            lengths = torch.full(scores.shape[:2], n, device=self.device)
            rank = metrics.rank(scores, positions, state)
            limits = (prompt.num_pages, state.settings.num_sinks, _protected_from(state))
            rule = (self.tables.block_size, self.allocation, metrics.metric.magnitude)
            evictions = schedule_evictions(rank, positions, lengths, *limits, *rule)
            chosen.append((prompt, ~evictions.evicted, scores))
        every = HostCopy(torch.stack([kept.sum(-1) for _, kept, _ in chosen])).wait().numpy()
        return [Adoption(*choice, lengths) for choice, lengths in zip(chosen, every, strict=True)]

    def fits(self, adoption: Adoption, more_pages: int) -> bool:
        """Return whether the pool, with so many more free pages, has pages for what stays."""
        needed = -(-adoption.lengths // self.tables.block_size)
        return int(needed.sum()) <= self.tables.pool.num_free_pages + more_pages

    def gather(self, adoption: Adoption) -> Survivors:
        """Read what stays of a prompt out of its ordinary blocks, which may be released afterwards."""
        table = to_device(torch.tensor(adoption.eviction.request.block_table), self.device)
        positions = torch.arange(adoption.kept.shape[-1], device=self.device)
        return self.cache.gather(table, adoption.kept, adoption.scores, positions, int(adoption.lengths.sum()))

    def adopt(self, adoption: Adoption, survivors: Survivors) -> None:
        """Move a prompt to head pages with the KVs that `gather` read. Raises OutOfBlocks, having changed nothing."""
        request, state = adoption.eviction.request, adoption.eviction.state
        state.index = self.tables.open(adoption.lengths)
        request.hold(HeadPageTable(self.tables, state.index, state))
        self.cache.store(survivors, self.tables.slots_of(state.index))
        self._count(state, adoption.lengths.size * state.num_tokens - int(adoption.lengths.sum()))

    def _together(self, evictions: Sequence[Eviction]) -> Iterator[list[Eviction]]:
        """Yield groups of requests that are sorted at a time: their heads are padded to the longest of all."""
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

    def _evict(self, batch: Sequence[Eviction]) -> CacheMoves:
        states = [eviction.state for eviction in batch]
        indices = np.array([state.index for state in states])
        slots, lengths = self.tables.slots_of(indices), self.tables.lengths_of(indices)
        stored, positions = self.cache.read(slots)
        rank = self._ranks(states, slots, stored, positions)
        numbers = [(one.num_pages, one.state.settings.num_sinks, _protected_from(one.state)) for one in batch]
        pages, sinks, protected_from = to_device(torch.tensor(numbers), self.device).unbind(1)
        rule = (self.tables.block_size, self.allocation, self.metrics.metric.magnitude)
        evictions = schedule_evictions(rank, positions, lengths, pages, sinks, protected_from, *rule)
        new_lengths = evictions.new_lengths(lengths)
        known = torch.cat([new_lengths.reshape(-1), num_moves(evictions, new_lengths)[None]])
        on_host = HostCopy(known).wait().numpy()
        moves = schedule_moves(evictions, lengths, slots, int(on_host[-1]))
        after = on_host[:-1].reshape(lengths.shape)
        before = self.tables.lengths[indices]
        self.num_freed += self.tables.shrink(indices, after)
        for state, evicted in zip(states, (before - after).sum((1, 2)).tolist(), strict=True):
            state.compressed_at = state.num_tokens
            self._count(state, evicted)
        return moves

    def _ranks(
        self, states: Sequence[CompressionState], slots: torch.Tensor, stored: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the ranks that eviction compares, [requests, L, H, n]. Each request is scored as if it were alone: a
        sum over more padding might round differently."""
        ranks, metrics = [], self.metrics
        n = slots.shape[-1]
        for i, state in enumerate(states):
            scores, at = stored[i], positions[i]
            if not metrics.keeps_scores:
                own = int(self.tables.lengths[state.index].max())
                scores = F.pad(metrics.head_page_scores(slots[i, ..., :own], at[..., :own]), (0, n - own))
            ranks.append(metrics.rank(scores, at, state))
        return torch.stack(ranks)

    def _count(self, state: CompressionState, evicted: int) -> None:
        self.num_evicted += evicted
        if evicted:
            state.num_compressions += 1
            self.num_compressions += 1


def _protected_from(state: CompressionState) -> int:
    return state.num_tokens - state.settings.protected_window_size
