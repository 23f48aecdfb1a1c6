"""SnapKV's metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_blend.features.kv_compress.metrics.base import EvictionMetric, LayerView, check_buffer, check_pool_size


@dataclass(frozen=True)
class SnapKV(EvictionMetric):
    """Attention from the prompt's last queries, its observation window (Li et al., SnapKV: LLM Knows What You are
    Looking for Before Generation, arXiv:2404.14469, section 4).

    Probabilities are summed over the window's queries, averaged over neighbouring keys of a query head (zeros beyond
    the ends, as in the authors' code) and summed over the query heads of a KV head. KVs of the window itself get the
    best score of their head. The paper compresses a prompt once; here KVs of generated tokens compete as well, by the
    attention that decode steps pay.

    `pool_size`: keys that are averaged, an odd number. `buffer`: a decode step does not count for keys nearer than
    this.
    """

    name: ClassVar[str] = "snapkv"
    watches: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True
    comparable: ClassVar[bool] = True

    buffer: int = 0
    pool_size: int = 5

    def __post_init__(self) -> None:
        check_buffer(self.buffer)
        check_pool_size(self.pool_size)

    def score(self, view: LayerView) -> torch.Tensor:
        sums = view.window_sums(power=1, buffer=0)
        if not sums.numel() or not len(view.window.positions):
            return sums[: view.kv_heads]
        watched = view.positions >= view.window.positions[0]  # [kv_heads, n]: the window itself
        before = sums.unflatten(0, (view.kv_heads, -1)).masked_fill(watched[:, None], 0.0)
        pooled = F.avg_pool1d(before, self.pool_size, stride=1, padding=self.pool_size // 2).sum(1)
        pooled = pooled.masked_fill(watched, 0.0)
        return torch.where(watched, pooled.amax(1, keepdim=True), pooled)
