"""The KV cache as head pages: each slot holds a KV of one head of one layer, with its metric and position beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.features.kv_compress.moves import CacheMoves, true_at
from vllm_blend.ops.e4m3 import as_bytes, gathered
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.worker.kv_cache import KVCache, zeros


@dataclass(frozen=True)
class Survivors:
    """KVs of a request that were read out of the cache: by layer, then head, then position."""

    key: torch.Tensor  # [m, head_dim], after RoPE
    value: torch.Tensor  # [m, head_dim]
    metric: torch.Tensor  # [m] float32
    position: torch.Tensor  # [m] int32
    lengths: torch.Tensor  # [L, H] int64, how many of them each head has


class CacheEngine:
    """Head pages over the memory of a `KVCache`: page (layer * num_blocks + block) * kv_heads + j is the j-th part of
    `key[layer, block]`. Slot = page * block_size + offset."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        num_layers, num_blocks, block_size, kv_heads, head_dim = cache.key.shape
        self.block_size = block_size
        pages = num_layers * num_blocks * kv_heads
        self.head_keys = cache.key.view(pages, block_size, 1, head_dim)
        self.head_values = cache.value.view(pages, block_size, 1, head_dim)
        self.layer = PagedKV(self.head_keys, self.head_values)  # what every layer attends in: a cache of one KV head
        self.metric = zeros((pages, block_size), torch.float32, cache.key.device)
        self.position = zeros((pages, block_size), torch.int32, cache.key.device)

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, kv_heads: int) -> int:
        """Return the bytes that metric and position of one block take in all layers."""
        return num_layers * block_size * kv_heads * (torch.float32.itemsize + torch.int32.itemsize)

    def gather(
        self, block_table: torch.Tensor, kept: torch.Tensor, metric: torch.Tensor, positions: torch.Tensor, count: int
    ) -> Survivors:
        """Read the KVs that stay of a request in ordinary blocks, before the blocks are released.

        `block_table` [blocks] integers on the device, `kept` [L, H, n] bool, `metric` [L, H, n], `positions` [L, H, n]
        or [n]: KV t of every head belongs to token t in the blocks. `count` is how many stay.
        """
        _, num_blocks, block_size, kv_heads, head_dim = self.cache.key.shape
        at, n = true_at(kept, count), kept.shape[-1]
        token, head, layer = at % n, at // n % kv_heads, at // (n * kv_heads)
        block = block_table.long()[token // block_size]
        row = ((layer * num_blocks + block) * block_size + token % block_size) * kv_heads + head
        keys, values = (gathered(tensor.view(-1, head_dim), row) for tensor in (self.cache.key, self.cache.value))
        return Survivors(
            keys,
            values,
            metric[layer, head, token].float(),
            positions.expand(kept.shape)[layer, head, token].int(),
            kept.sum(-1),
        )

    def store(self, survivors: Survivors, slots: torch.Tensor) -> None:
        """Write what `gather` read to `slots` [L, H, n_max] int64, of which each head's first `lengths` are not -1 (see
        `HeadTables.slots_of`). Raises RuntimeError if their numbers differ, having written nothing; only on a CPU, as
        nothing waits for a GPU."""
        count, there = len(survivors.metric), slots >= 0
        if slots.is_cpu and int(there.sum()) != count:
            raise RuntimeError(f"{count} KVs do not go into {int(there.sum())} slots")
        target = slots.reshape(-1)[true_at(there, count)]
        values = (as_bytes(survivors.key), as_bytes(survivors.value), survivors.metric, survivors.position)
        for tensor, value in zip(self._slots(), values, strict=True):
            tensor[target] = value

    def record_new(self, slots: torch.Tensor, positions: torch.Tensor, metric: float) -> None:
        """Record the `positions` [rows] and the metric of new tokens' KVs, which are in `slots` [L, rows] int64 or are
        written there next. Nothing waits for the device, and a graph may capture it."""
        self.position.view(-1)[slots] = positions.to(torch.int32).expand(slots.shape)
        self.metric.view(-1).index_fill_(0, slots.reshape(-1), metric)  # an assignment would copy it from the host

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return metric, float32, and positions, int64, of the KVs in `slots`, in the same shape; 0 and -1 where a slot
        is -1."""
        there, at = slots >= 0, slots.clamp(min=0)
        metric, position = self.metric.view(-1)[at], self.position.view(-1)[at].long()
        return metric.masked_fill_(~there, 0.0), position.masked_fill_(~there, -1)

    def execute_cache_moves(self, moves: CacheMoves) -> None:
        """Move K, V, metric and position of every source to its target; all are read before any is written."""
        if len(moves):
            for tensor in self._slots():
                tensor[moves.target] = tensor[moves.source]

    def _slots(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return K and V, e4m3 as bytes, metric and position by slot."""
        head_dim = self.head_keys.shape[-1]
        return (
            as_bytes(self.head_keys).view(-1, head_dim),
            as_bytes(self.head_values).view(-1, head_dim),
            self.metric.view(-1),
            self.position.view(-1),
        )
