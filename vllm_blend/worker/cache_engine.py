"""The KV cache as head pages: a KV of one head of one layer a slot, with its metric and position beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.attention.metadata import LayerCache
from vllm_blend.kv_compress.moves import CacheMoves, true_at
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
        self.metric = zeros((pages, block_size), torch.float32, cache.key.device)
        self.position = zeros((pages, block_size), torch.int32, cache.key.device)

    @property
    def layer(self) -> LayerCache:
        """What every layer attends in: one cache of one KV head."""
        return LayerCache(self.head_keys, self.head_values)

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, kv_heads: int) -> int:
        """Metric and position of one block in all layers: what there is beside its K and V."""
        return num_layers * block_size * kv_heads * (torch.float32.itemsize + torch.int32.itemsize)

    def gather(
        self,
        block_table: torch.Tensor,
        kept: torch.Tensor,
        metric: torch.Tensor,
        positions: torch.Tensor,
        count: int | None = None,
    ) -> Survivors:
        """Read the KVs that stay of a request in ordinary blocks, before these are released.

        `block_table` [blocks] integers on the device, `kept` [L, H, n] bool, `metric` [L, H, n], `positions` [L, H, n]
        or [n]: KV t of every head is that of token t in the blocks. `count`: how many stay; a GPU is waited for where
        it is not given.
        """
        _, num_blocks, block_size, kv_heads, head_dim = self.cache.key.shape
        at, n = true_at(kept, count), kept.shape[-1]
        token, head, layer = at % n, at // n % kv_heads, at // (n * kv_heads)
        block = block_table.long()[token // block_size]
        row = ((layer * num_blocks + block) * block_size + token % block_size) * kv_heads + head
        keys, values = (tensor.view(-1, head_dim)[row] for tensor in (self.cache.key, self.cache.value))
        return Survivors(
            keys,
            values,
            metric[layer, head, token].float(),
            positions.expand(kept.shape)[layer, head, token].int(),
            kept.sum(-1),
        )

    def store(self, survivors: Survivors, slots: torch.Tensor) -> None:
        """Write what `gather` read to `slots` [L, H, n_max] int64, of which each head's first `lengths` are not -1 (see
        `HeadTables.slots_of`). Raises RuntimeError when they are not as many (on a CPU: nothing waits for a GPU),
        having written nothing."""
        count, there = len(survivors.metric), slots >= 0
        if slots.is_cpu and int(there.sum()) != count:
            raise RuntimeError(f"{count} KVs do not go into {int(there.sum())} slots")
        target = slots.reshape(-1)[true_at(there, count)]
        values = (survivors.key, survivors.value, survivors.metric, survivors.position)
        for tensor, value in zip(self._slots(), values, strict=True):
            tensor[target] = value

    def enter(self, slots: torch.Tensor, positions: torch.Tensor, metric: float = 0.0) -> None:
        """The KVs of new tokens, which are in `slots` [L, rows] int64 or about to be written there, have `positions`
        [rows] or [L, rows] and this metric. Nothing waits for the device, and a graph may capture it."""
        self.position.view(-1)[slots] = positions.to(torch.int32).expand(slots.shape)
        self.metric.view(-1).index_fill_(0, slots.reshape(-1), metric)  # an assignment would copy it from the host

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Metric, float32, and positions, int64, of the KVs in `slots`, of the same shape; 0 and -1 where a slot is
        -1."""
        there, at = slots >= 0, slots.clamp(min=0)
        metric, position = self.metric.view(-1)[at], self.position.view(-1)[at].long()
        return metric.masked_fill_(~there, 0.0), position.masked_fill_(~there, -1)

    def execute_cache_moves(self, moves: CacheMoves) -> None:
        """K, V, metric and position of every source go to its target; all are read before any is written."""
        if len(moves):
            for tensor in self._slots():
                tensor[moves.target] = tensor[moves.source]

    def _slots(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """K, V, metric and position by slot."""
        head_dim = self.head_keys.shape[-1]
        return (
            self.head_keys.view(-1, head_dim),
            self.head_values.view(-1, head_dim),
            self.metric.view(-1),
            self.position.view(-1),
        )
