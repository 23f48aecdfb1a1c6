"""Expected Attention's metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.features.kv_compress.metrics.base import EvictionMetric, LayerView, Window, check_buffer, wide


@dataclass(frozen=True)
class ExpectedAttention(EvictionMetric):
    """Attention that queries yet to come will pay, from the distribution of past ones (Devoto et al., Expected
    Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution, arXiv:2510.00636, section
    3).

    Queries before RoPE are taken for normally distributed, with the mean m and covariance C of the prompt's last ones;
    rotated by the average of the next `future_positions` rotations, a key k expects the weight
    exp(scale k.m + scale^2 k.C.k / 2), here normalised over the keys, times the norm of its value relative to the mean
    of its head (`value_norm`). The result counts as much as the window's queries do in the metrics that sum their
    attention, so that what decode steps add is of the same size.

    `buffer`: a decode step does not count for keys nearer than this.
    """

    name: ClassVar[str] = "expected_attention"
    watches: ClassVar[bool] = True
    accumulates: ClassVar[bool] = True

    buffer: int = 0
    future_positions: int = 512
    value_norm: bool = True

    def __post_init__(self) -> None:
        check_buffer(self.buffer)
        if self.future_positions < 1:
            raise ValueError(f"future_positions={self.future_positions} must be at least 1")

    def score(self, view: LayerView) -> torch.Tensor:
        kv_heads, n, _ = view.keys.shape
        count = len(view.window.positions)
        out = torch.zeros(kv_heads, n, dtype=wide(view.keys[:0]).dtype, device=view.keys.device)
        if not count or not n:
            return out
        mean, spread = self._future_queries(view.window, n)
        mean, spread = mean.unflatten(0, (kv_heads, -1)), spread.unflatten(1, (kv_heads, -1))
        for head in range(kv_heads):  # one at a time: no [heads, w, n] of all of them
            keys = wide(view.keys[head]).T * view.scale  # [head_dim, n]
            variance = (spread[:, head] @ keys).square().mean(0)  # [group, n]: k.C.k without C
            expected = (mean[head] @ keys + variance / 2).softmax(-1)
            out[head] = expected.sum(0) * count
        if self.value_norm:
            norms = wide(view.values).norm(dim=-1)
            out *= norms / norms.mean(1, keepdim=True).clamp_min(torch.finfo(out.dtype).tiny)
        return out

    def _future_queries(self, window: Window, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean [heads, head_dim] of future queries, and the window's deviations from it [w, heads,
        head_dim], both after the average rotation."""
        rotary = window.rotary
        if rotary is None:
            raise ValueError("expected_attention undoes the rotation of queries: the window needs its `rotary`")
        cos, sin = (table[:, None].to(wide(window.queries[:0]).dtype) for table in rotary.cos_sin(window.positions))
        length = cos.square() + sin.square()  # not 1 where RoPE scales attention, as YaRN's does
        queries = rotate(wide(window.queries), cos / length, -sin / length)
        first = min(n, rotary.max_position - 1)
        last = min(first + self.future_positions, rotary.max_position)
        cos, sin = rotary.cos_sin(torch.arange(first, last, device=queries.device))
        queries = rotate(queries, cos.mean(0).to(queries.dtype), sin.mean(0).to(queries.dtype))
        mean = queries.mean(0)
        return mean, queries - mean


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., head_dim] by cos and sin [..., rotary_dim / 2], in the dtype of x; channels beyond stay."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
