"""A pool of blocks with everything that keeps head pages in it, and requests in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_blend.core.block_manager import BlockManager
from vllm_blend.features.kv_compress.cache_engine import CacheEngine
from vllm_blend.features.kv_compress.evictions import Evictions, schedule_evictions
from vllm_blend.features.kv_compress.moves import num_moves, schedule_moves
from vllm_blend.features.kv_compress.pages import HeadPagePool
from vllm_blend.features.kv_compress.tables import HeadTables
from vllm_blend.worker.kv_cache import KVCache

CPU = torch.device("cpu")
KV = tuple[float, ...]  # metric, position, K and V
Content = list[list[KV]]
Number = int | torch.Tensor


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    block_size: int
    num_blocks: int
    head_dim: int = 2


class Store:
    """A cache whose memory starts out as NaN, so that reading unwritten slots spoils a result. Its content is the
    same on every device."""

    def __init__(self, shape: Shape, seed: int, device: torch.device = CPU) -> None:
        self.shape, self.device, self.generator = shape, device, torch.Generator().manual_seed(seed)
        size = (shape.layers, shape.num_blocks, shape.block_size, shape.heads, shape.head_dim)
        self.cache = KVCache(*(torch.full(size, torch.nan, device=device) for _ in "kv"))
        self.engine = CacheEngine(self.cache)
        self.engine.metric.fill_(torch.nan)
        self.engine.position.fill_(-7)
        self.blocks = BlockManager(shape.num_blocks, shape.block_size)
        self.pool = HeadPagePool(self.blocks, shape.layers, shape.heads)
        self.tables = HeadTables(self.pool, shape.layers, shape.heads, shape.block_size, 1000, device)

    @property
    def keys(self) -> torch.Tensor:
        """K by slot."""
        return self.engine.head_keys.view(-1, self.shape.head_dim)

    @property
    def values(self) -> torch.Tensor:
        """V by slot."""
        return self.engine.head_values.view(-1, self.shape.head_dim)

    def noise(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device)

    def prefill(self, n: int) -> tuple[list[int], torch.Tensor]:
        """A prompt of n tokens in ordinary blocks; its block table and metrics."""
        table = self.blocks.allocate(self.blocks.blocks_for(n))
        for pages in (self.cache.key, self.cache.value):
            pages[:, table] = self.noise(*pages[:, table].shape)
        return table, self.noise(self.shape.layers, self.shape.heads, n)

    def adopt(self, table: list[int], metric: torch.Tensor, evictions: Evictions) -> int:
        """Move what stays of a prompt from ordinary blocks into head pages."""
        at, kept = torch.arange(metric.shape[2], device=self.device), ~evictions.evicted
        blocks = torch.tensor(table, dtype=torch.int32, device=self.device)
        survivors = self.engine.gather(blocks, kept, metric, at, int(kept.sum()))
        self.blocks.release(table)
        index = self.tables.open(survivors.lengths.cpu().numpy())
        self.engine.store(survivors, self.tables.slots_of(index))
        return index

    def decode(self, index: int, position: int) -> bool:
        """One more token of a request in head pages; whether there was room."""
        if not self.tables.append(index):
            return False
        batch = self.tables.decode_batch([index])
        for pages in (self.keys, self.values):
            pages[batch.slots] = self.noise(*batch.slots.shape, self.shape.head_dim)
        self.engine.record_new(batch.slots, torch.full((self.shape.heads,), position, device=self.device), 0.0)
        self.engine.metric.view(-1)[batch.slots] += self.noise(*batch.slots.shape)
        return True

    def compress(
        self, at: int | list[int], num_blocks: Number, sinks: int, protected_from: Number, allocation: str
    ) -> Evictions:
        """Evict from one request in head pages, or several at once; what becomes free is what was promised."""
        slots, lengths = self.tables.slots_of(at), self.tables.lengths_of(at)
        metric, positions = self.engine.read(slots)
        limits = (num_blocks, sinks, protected_from, self.shape.block_size, allocation)
        evictions = schedule_evictions(metric, positions, lengths, *limits)  # type: ignore[arg-type]
        new_lengths = evictions.new_lengths(lengths)
        moves = schedule_moves(evictions, lengths, slots, int(num_moves(evictions, new_lengths)))
        assert len(moves) == len(moves.source) == len(moves.target)
        assert len(set(moves.target.tolist())) == len(moves)  # unique
        assert not set(moves.target.tolist()) & set(moves.source.tolist())
        self.engine.execute_cache_moves(moves)
        free = self.pool.num_free_pages
        assert self.tables.shrink(at, new_lengths.cpu().numpy()) == evictions.num_blocks.sum()
        assert self.pool.num_free_pages == free + evictions.num_blocks.sum()
        return evictions

    def content(self, index: int) -> Content:
        """All KVs of a request, head by head of all layers, in the order of their slots."""
        slots = self.tables.slots_of(index).flatten(0, 1)
        metric, positions = self.engine.read(slots)
        assert (metric[slots < 0] == 0).all() and (positions[slots < 0] == -1).all()
        packed = torch.cat([metric[..., None], positions[..., None].float(), self.keys[slots], self.values[slots]], -1)
        return [[tuple(kv) for kv in kvs[real].tolist()] for kvs, real in zip(packed, slots >= 0, strict=True)]
