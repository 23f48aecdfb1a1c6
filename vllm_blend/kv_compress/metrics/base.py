"""What an eviction metric is: one method that says what each cached KV of a layer is worth.

The life of a metric's numbers: at the end of a prompt `score` looks at the request's blocks (a `BlockView`) and its
result is stored beside K and V. A metric that `accumulates` has every decode step add what the step's query attends to
(`ops.accumulate_sums` with the metric's `power` and `buffer`), and eviction compares `rank` of what is stored. One that
only `watches` keeps the scores of its prompt, and generated tokens go last. Any other metric is scored again, from what
the head pages hold by then (a `HeadView`), before each eviction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import torch

from vllm_blend import ops


class Rotary(Protocol):
    """What a metric needs of `vllm_blend.layers.rotary.RotaryEmbedding`."""

    max_position: int

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at positions [T] int64, each [T, rotary_dim / 2] float32."""
        ...


@dataclass(frozen=True)
class Window:
    """The last queries of a prompt in one layer."""

    queries: torch.Tensor  # [w, heads, head_dim], after RoPE
    positions: torch.Tensor  # [w] int64, ascending
    rotary: Rotary | None = None  # of the layer, for metrics that need the queries before RoPE


class LayerView:
    """The KVs of one request in one layer: a `BlockView` or a `HeadView`."""

    layer_idx: int
    num_layers: int
    scale: float  # of attention scores
    keys: torch.Tensor  # [kv_heads, n, head_dim], after RoPE; rows that are not `valid` hold anything, NaN included
    values: torch.Tensor  # [kv_heads, n, head_dim], likewise
    positions: torch.Tensor  # [kv_heads, n] int64
    valid: torch.Tensor  # [kv_heads, n] bool: heads may hold different numbers of KVs

    @property
    def kv_heads(self) -> int:
        return self.positions.shape[0]

    @property
    def window(self) -> Window:
        """The prompt's last queries. Raises ValueError where nobody kept them."""
        raise ValueError(
            "this metric looks at the last queries of a prompt, and they are known only when the prompt has just been "
            "computed: use a metric whose `watches` is False here, such as keydiff or knorm"
        )

    def window_sums(self, power: int, buffer: int) -> torch.Tensor:
        """`ops.window_sums` of the window: [heads, n] float32. Raises ValueError where there is no window."""
        raise ValueError(f"{type(self).__name__} has no queries to sum over: score the request's blocks instead")


@dataclass(frozen=True)
class BlockView(LayerView):
    """A prompt in ordinary blocks: every position 0 .. n - 1 of every head, in order."""

    layer_idx: int
    num_layers: int
    scale: float
    key_cache: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor
    block_table: torch.Tensor  # [W] int32
    n: int
    last_queries: Window | None = None

    @cached_property
    def keys(self) -> torch.Tensor:  # type: ignore[override]
        return self._gathered(self.key_cache)

    @cached_property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self._gathered(self.value_cache)

    @cached_property
    def positions(self) -> torch.Tensor:  # type: ignore[override]
        return torch.arange(self.n, device=self.key_cache.device).expand(self.key_cache.shape[2], -1)

    @cached_property
    def valid(self) -> torch.Tensor:  # type: ignore[override]
        return torch.ones(self.key_cache.shape[2], self.n, dtype=torch.bool, device=self.key_cache.device)

    @property
    def window(self) -> Window:
        return super().window if self.last_queries is None else self.last_queries

    def window_sums(self, power: int, buffer: int) -> torch.Tensor:
        at = self.window
        return ops.window_sums(
            at.queries, self.key_cache, self.block_table, self.n, at.positions, self.scale, power, buffer
        )

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        return cache[self.block_table[: -(-self.n // cache.shape[1])]].flatten(0, 1)[: self.n].transpose(0, 1)


@dataclass(frozen=True)
class HeadView(LayerView):
    """KVs in head pages, or of a stored chunk: each head has its own number of them, at positions in any order."""

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
    magnitude: ClassVar[float] = 0.0  # the least size that rounding of scores is relative to, see `ties.py`
    power: int = 1  # what is added is p ** power: 1 or 2
    buffer: int = 0  # a query adds nothing to the keys nearer than this

    @abstractmethod
    def score(self, view: LayerView) -> torch.Tensor:
        """What each KV is worth: [kv_heads, n] float32, larger being kept longer. Finite; where the view is not
        `valid` it means nothing."""

    def rank(self, scores: torch.Tensor, positions: torch.Tensor, query_positions: torch.Tensor) -> torch.Tensor:
        """What eviction compares, from what is stored: like scores [..., n], of KVs at positions [..., n] int64, when
        the queries at query_positions [q] int64, ascending, have been counted: the window's and those of the decode
        steps since."""
        return scores


def held(x: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """x [kv_heads, n, head_dim] in float32 (float64 as it is), zeros where it is not `valid`."""
    return torch.where(valid[..., None], wide(x), 0.0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or float64 as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_buffer(buffer: int) -> None:
    if buffer < 0:
        raise ValueError(f"metric_collection_buffer_size={buffer} must be at least 0")


def check_pool_size(pool_size: int) -> None:
    if pool_size < 1 or pool_size % 2 == 0:
        raise ValueError(f"pool_size={pool_size} must be an odd number of at least 1: as many keys on either side")
