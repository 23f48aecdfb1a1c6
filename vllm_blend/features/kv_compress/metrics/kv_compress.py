"""KV-Compress's own metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_blend.features.kv_compress.metrics.base import EvictionMetric, LayerView, check_buffer, check_pool_size

POWERS = {"L1-sum": 1, "L1-avg": 1, "L2-sum": 2, "L2-avg": 2}


@dataclass(frozen=True)
class KVCompress(EvictionMetric):
    """Squared attention that a KV receives (Rehg, KV-Compress: Paged KV-Cache Compression with Variable Compression
    Rates per Attention Head, arXiv:2410.00161, section 4).

    The attention probabilities of the prompt's last queries, to the power of 2 (L2) or 1 (L1), are summed over queries,
    max-pooled over neighbouring keys of a query head, and summed over the query heads of a KV head; decode steps add
    theirs, not pooled. "avg" divides by the number of queries that a KV has been counted for, so that a KV is not worth
    more for having been there longer.

    `pool_size`: keys that are pooled, an odd number. `buffer`: a query does not count for keys nearer than this.
    """

    name: ClassVar[str] = "kv_compress"
    watches: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True
    comparable: ClassVar[bool] = True

    aggregation: str = "L2-sum"
    buffer: int = 0
    pool_size: int = 7

    def __post_init__(self) -> None:
        if self.aggregation not in POWERS:
            raise ValueError(f"metric_aggregation={self.aggregation!r} is unknown: use one of {', '.join(POWERS)}")
        check_buffer(self.buffer)
        check_pool_size(self.pool_size)

    @property
    def power(self) -> int:  # type: ignore[override]
        return POWERS[self.aggregation]

    def score(self, view: LayerView) -> torch.Tensor:
        sums = view.window_sums(self.power, self.buffer)
        if not sums.numel():
            return sums[: view.kv_heads]
        pooled = F.max_pool1d(sums[None], self.pool_size, stride=1, padding=self.pool_size // 2)[0]
        sums_of_heads: torch.Tensor = pooled.unflatten(0, (view.kv_heads, -1)).sum(1)
        return sums_of_heads

    def rank(self, scores: torch.Tensor, positions: torch.Tensor, query_positions: torch.Tensor) -> torch.Tensor:
        if not self.aggregation.endswith("avg"):
            return scores
        return scores / count_queries(positions, query_positions, self.buffer).clamp_min(1)


def count_queries(positions: torch.Tensor, query_positions: torch.Tensor, buffer: int) -> torch.Tensor:
    """Return how many of the queries at query_positions [q] int64, ascending, have counted for a KV at each of
    `positions`."""
    earlier = torch.searchsorted(query_positions, (positions + buffer).contiguous())
    return len(query_positions) - earlier
