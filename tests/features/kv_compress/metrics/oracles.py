"""What every metric must give, in dense float64 numpy, and random prompts in paged blocks to try them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_blend.features.kv_compress.metrics import BlockView, Window
from vllm_blend.layers.rope_frequencies import RopeSpec
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.ops.paged_kv import PagedKV

THETA = 10000.0


@dataclass(frozen=True)
class Prompt:
    """n tokens of one layer, their KV scattered over blocks; what is not theirs is NaN."""

    queries: torch.Tensor  # [w, heads, head_dim] float32
    query_positions: torch.Tensor
    keys: torch.Tensor  # [n, kv_heads, head_dim]
    values: torch.Tensor
    rotary: RotaryEmbedding
    block_size: int
    seed: int

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def scale(self) -> float:
        scale: float = self.keys.shape[2] ** -0.5
        return scale

    def view(self, layout_seed: int = 0, layer_idx: int = 0) -> BlockView:
        n = len(self.keys)
        blocks = -(-n // self.block_size)
        order = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(layout_seed))[:blocks]
        caches = []
        for rows in (self.keys, self.values):
            cache = torch.full((blocks + 2, self.block_size, *rows.shape[1:]), float("nan"))
            padded = torch.full((blocks * self.block_size, *rows.shape[1:]), float("nan"))
            padded[:n] = rows
            cache[order] = padded.unflatten(0, (blocks, self.block_size))
            caches.append(cache)
        window = Window(self.queries, self.query_positions, self.rotary)
        return BlockView(layer_idx, 2, self.scale, PagedKV(*caches), order.int(), n, window)

    def probabilities(self) -> np.ndarray:
        """[heads, w, n]: causal softmax, of each query and head for itself."""
        q, k = self.queries.double().numpy(), self.keys.double().numpy()
        w, heads, _ = q.shape
        group = heads // self.kv_heads
        result = np.zeros((heads, w, len(k)))
        for head in range(heads):
            for i, position in enumerate(self.query_positions.tolist()):
                scores = k[: position + 1, head // group] @ q[i, head] * self.scale
                weights = np.exp(scores - scores.max())
                result[head, i, : position + 1] = weights / weights.sum()
        return result


def prompt(
    n: int = 40,
    w: int = 6,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    seed: int = 0,
    max_position: int = 2048,
    rotary_dim: int | None = None,
    attention_factor: float | None = None,
) -> Prompt:
    random = torch.Generator().manual_seed(seed)
    spec = RopeSpec("default", rotary_dim or head_dim, THETA, attention_factor=attention_factor)
    return Prompt(
        torch.randn(w, kv_heads * group, head_dim, generator=random) * 2,
        torch.arange(n - w, n),
        torch.randn(n, kv_heads, head_dim, generator=random) + 0.5,
        torch.randn(n, kv_heads, head_dim, generator=random),
        RotaryEmbedding(spec, max_position),
        block_size,
        seed,
    )


def kv_compress(p: Prompt, metric: Any) -> np.ndarray:
    probabilities = p.probabilities() ** (2 if metric.aggregation.startswith("L2") else 1)
    heads, _, n = probabilities.shape
    sums = np.zeros((heads, n))
    for i, position in enumerate(p.query_positions.tolist()):
        reach = max(0, position - metric.buffer + 1)
        sums[:, :reach] += probabilities[:, i, :reach]
    half = metric.pool_size // 2
    pooled = np.stack([sums[:, max(0, key - half) : key + half + 1].max(1) for key in range(n)], 1)
    scores: np.ndarray = pooled.reshape(p.kv_heads, -1, n).sum(1)
    return scores


def snapkv(p: Prompt, metric: Any) -> np.ndarray:
    sums = p.probabilities().sum(1)
    heads, n = sums.shape
    before = int(p.query_positions[0])
    half = metric.pool_size // 2
    pooled = np.zeros((heads, n))
    for key in range(before):
        pooled[:, key] = sums[:, max(0, key - half) : min(before, key + half + 1)].sum(1) / metric.pool_size
    summed: np.ndarray = pooled.reshape(p.kv_heads, -1, n).sum(1)
    summed[:, before:] = summed[:, :before].max(1, keepdims=True) if before else 0.0
    return summed


def expected_attention(p: Prompt, metric: Any) -> np.ndarray:
    q, k, v = (x.double().numpy() for x in (p.queries, p.keys, p.values))
    w, heads, head_dim = q.shape
    n, group = len(k), heads // p.kv_heads
    spec = p.rotary.spec
    half = spec.rotary_dim // 2

    def rotation(position: int) -> np.ndarray:
        matrix = np.eye(head_dim)
        for i in range(half):
            angle = position * THETA ** (-2 * i / spec.rotary_dim)
            c, s = np.cos(angle), np.sin(angle)
            factor = spec.attention_factor or 1.0
            matrix[i, i] = matrix[i + half, i + half] = c * factor
            matrix[i, i + half], matrix[i + half, i] = -s * factor, s * factor
        return matrix

    first = min(n, p.rotary.max_position - 1)
    future = range(first, min(first + metric.future_positions, p.rotary.max_position))
    average = np.mean([rotation(position) for position in future], 0)
    result = np.zeros((p.kv_heads, n))
    for head in range(heads):
        plain = np.stack([np.linalg.solve(rotation(int(at)), q[i, head]) for i, at in enumerate(p.query_positions)])
        mean = average @ plain.mean(0)
        covariance = average @ np.cov(plain.T, bias=True) @ average.T
        keys = k[:, head // group] * p.scale
        expected = np.exp(keys @ mean + np.einsum("nd,de,ne->n", keys, covariance, keys) / 2)
        result[head // group] += w * expected / expected.sum()
    if metric.value_norm:
        norms = np.linalg.norm(v, axis=2).T
        result *= norms / norms.mean(1, keepdims=True)
    return result


def keydiff(p: Prompt, metric: Any) -> np.ndarray:
    k = p.keys.double().numpy().transpose(1, 0, 2)
    unit = k / np.linalg.norm(k, axis=2, keepdims=True)
    anchor = unit.mean(1, keepdims=True)
    scores: np.ndarray = -(unit * anchor).sum(2) / np.linalg.norm(anchor, axis=2)
    return scores


def knorm(p: Prompt, metric: Any) -> np.ndarray:
    scores: np.ndarray = -np.linalg.norm(p.keys.double().numpy(), axis=2).T
    return scores


def streaming_llm(p: Prompt, metric: Any) -> np.ndarray:
    return np.tile(np.arange(float(len(p.keys))), (p.kv_heads, 1))


def random(p: Prompt, metric: Any) -> np.ndarray:
    """The same hash in plain integers."""

    def mix(x: int) -> int:
        x = (x + 0x1E3779B9) % 2**32
        for multiplier in (0x7FEB352D, 0x6C8E9CF5):
            x = ((x ^ (x >> 16)) * multiplier) % 2**32
        return x ^ (x >> 15)

    def number(head: int, position: int) -> float:
        state = mix(metric.seed % 2**32)
        for part in (0, head, position):
            state = mix(state ^ part)
        return (state >> 8) / 2**24

    return np.array([[number(head, at) for at in range(len(p.keys))] for head in range(p.kv_heads)])


ORACLES: dict[str, Callable[[Prompt, Any], np.ndarray]] = {
    oracle.__name__: oracle
    for oracle in (kv_compress, snapkv, expected_attention, keydiff, knorm, streaming_llm, random)
}
