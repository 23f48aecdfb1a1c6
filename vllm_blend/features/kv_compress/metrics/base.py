"""The base of eviction metrics: one method that scores each cached KV of a layer by its worth.

At the end of a prompt `score` looks at the request's blocks (a `BlockView`), and its result is stored beside K and V.
If the metric `accumulates`, every decode step adds what its query attends to (`ops.accumulate_sums` with the metric's
`power` and `buffer`), and eviction compares the `rank` of the stored numbers. A metric that only `watches` keeps the
scores of its prompt, and generated tokens go last. Any other metric scores the head pages again (a `HeadView`) before
each eviction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from vllm_blend.features.kv_compress import ops
from vllm_blend.features.kv_compress.sums import SumRule, WindowKeys
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.ops.e4m3 import gathered, readable
from vllm_blend.ops.paged_kv import PagedKV


@dataclass(frozen=True)
class Window:
    """The last queries of a prompt in one layer."""

    queries: torch.Tensor  # [w, heads, head_dim], after RoPE
    positions: torch.Tensor  # [w] int64, ascending
    rotary: RotaryEmbedding | None = None  # of the layer, for metrics that need the queries before RoPE


class LayerView:
    """The KVs of one request in one layer: a `BlockView` or a `HeadView`."""

    layer_idx: int
    num_layers: int
    scale: float  # of attention scores
    keys: torch.Tensor  # [kv_heads, n, head_dim], after RoPE; rows that are not `valid` hold anything, NaN included.
    # In the units of `KVScales` where the cache has these; so are queries, and each head has a unit of its own.
    values: torch.Tensor  # [kv_heads, n, head_dim], likewise
    positions: torch.Tensor  # [kv_heads, n] int64
    valid: torch.Tensor  # [kv_heads, n] bool: heads may hold different numbers of KVs

    @property
    def kv_heads(self) -> int:
        return self.positions.shape[0]

    @property
    def window(self) -> Window:
        """Return the prompt's last queries. Raises ValueError if they were not kept."""
        raise ValueError(
            "this metric looks at the last queries of a prompt, and they are known only when the prompt has just been "
            "computed: use a metric whose `watches` is False here, such as keydiff or knorm"
        )

    def window_sums(self, power: int, buffer: int) -> torch.Tensor:
        """Return `ops.window_sums` of the window: [heads, n] float32. Raises ValueError if there is no window."""
        raise ValueError(f"{type(self).__name__} has no queries to sum over: score the request's blocks instead")


@dataclass(frozen=True)
class BlockView(LayerView):
    """A prompt in ordinary blocks: every position 0 .. n - 1 of every head, in order."""

    layer_idx: int
    num_layers: int
    scale: float
    kv: PagedKV
    block_table: torch.Tensor  # [W] int32
    n: int
    last_queries: Window | None = None

    @cached_property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return self._gathered(self.kv.key)

    @cached_property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self._gathered(self.kv.value)

    @cached_property
    def positions(self) -> torch.Tensor:  # type: ignore[override]
        return torch.arange(self.n, device=self.kv.key.device).expand(self.kv.kv_heads, -1)

    @cached_property
    def valid(self) -> torch.Tensor:  # type: ignore[override]
        return torch.ones(self.kv.kv_heads, self.n, dtype=torch.bool, device=self.kv.key.device)

    @property
    def window(self) -> Window:
        return super().window if self.last_queries is None else self.last_queries

    def window_sums(self, power: int, buffer: int) -> torch.Tensor:
        at = self.window
        keys = WindowKeys(self.block_table, self.n, at.positions)
        return ops.window_sums(at.queries, self.kv, keys, SumRule(self.scale, power, buffer))

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        blocks = gathered(cache, self.block_table[: -(-self.n // cache.shape[1])])
        return readable(blocks.flatten(0, 1)[: self.n].transpose(0, 1))


@dataclass(frozen=True)
class HeadView(LayerView):
    """KVs in head pages: each head has its own number of them, at positions in any order."""

    layer_idx: int
    num_layers: int
    scale: float
    keys: torch.Tensor  # [kv_heads, n, head_dim]
    values: torch.Tensor
    positions: torch.Tensor  # [kv_heads, n] int64
    valid: torch.Tensor  # [kv_heads, n] bool


class EvictionMetric(ABC):
    """Base of all metrics. A subclass is a frozen dataclass (its fields are its settings) with a `name` and a `score`;
    one that `accumulates` has a `power` and a `buffer` too."""

    name: ClassVar[str]
    watches: ClassVar[bool] = False  # `score` needs the prompt's last queries
    accumulates: ClassVar[bool] = False  # decode steps add to what is stored
    comparable: ClassVar[bool] = False  # whether scores of different heads and layers say which KV is worth more
    magnitude: ClassVar[float] = 0.0  # smaller scores round as if this large, see `evictions.tie_starts`
    power: int = 1  # what is added is p ** power: 1 or 2
    buffer: int = 0  # a query adds nothing to the keys nearer than this

    @abstractmethod
    def score(self, view: LayerView) -> torch.Tensor:
        """Return a score for each KV, [kv_heads, n] float32, finite: the larger, the longer it is kept. Scores of KVs
        that are not `valid` are ignored."""

    def rank(self, scores: torch.Tensor, positions: torch.Tensor, query_positions: torch.Tensor) -> torch.Tensor:
        """Return what eviction compares, [..., n] like the stored scores, of KVs at positions [..., n] int64. The
        queries that have been counted, the window's and those of decode steps since, were at query_positions [q] int64,
        ascending."""
        return scores


def held(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return x [kv_heads, n, head_dim] in float32 (float64 as it is), with zeros where it is not `valid`."""
    return torch.where(valid[..., None], wide(x), 0.0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32, or float64 as it is."""
    x = readable(x)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_buffer(buffer: int) -> None:
    if buffer < 0:
        raise ValueError(f"metric_collection_buffer_size={buffer} must be at least 0")


def check_pool_size(pool_size: int) -> None:
    if pool_size < 1 or pool_size % 2 == 0:
        raise ValueError(f"pool_size={pool_size} must be an odd number of at least 1: as many keys on either side")
