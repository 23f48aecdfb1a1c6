"""Float64 twins of the attention kernels, and random paged problems to compare them on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from vllm_blend.ops.e4m3 import gathered, narrowed, widened
from vllm_blend.ops.paged_kv import PagedKV

DEVICE = "cuda"
# The condition is a text: pytest evaluates it in the test's module, and only where a GPU runs the tests.
HOPPER = pytest.mark.skipif("torch.cuda.get_device_capability()[0] != 9", reason="only Hopper has wgmma")
FP8_PRODUCTS = pytest.mark.skipif("torch.cuda.get_device_capability() < (8, 9)", reason="no FP8 products on this GPU")
VARIANTS = ["mma", pytest.param("wgmma", marks=HOPPER)]


@dataclass(frozen=True)
class Problem:
    """A batch of requests over one paged cache whose unused slots are NaN, with shuffled pages."""

    q: torch.Tensor  # [tokens, q_heads, head_dim]
    key: torch.Tensor  # [num_blocks, block_size, kv_heads, head_dim]
    value: torch.Tensor
    positions: torch.Tensor  # [tokens] int64
    query_start_loc: torch.Tensor  # [requests + 1] int32
    block_tables: torch.Tensor  # [requests, max_blocks] int32
    scale: float

    @cached_property
    def kv(self) -> PagedKV:
        return PagedKV(self.key, self.value)


def random_positions(length: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` ascending positions below `length`, the last among them as a request's newest token always is."""
    others = torch.randperm(length - 1, generator=generator)[: count - 1]
    return torch.cat([others, torch.tensor([length - 1])]).sort().values if count else torch.empty(0, dtype=torch.int64)


def make_problem(
    lengths: list[int],
    counts: list[int],
    q_heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    cache_dtype: torch.dtype | None = None,
) -> Problem:
    """Requests of these lengths with these numbers of query tokens at random positions. The cache is of `dtype` unless
    said otherwise."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-n // block_size) for n in lengths]
    total = sum(blocks) + 3
    order = torch.randperm(total, generator=generator)[: sum(blocks)].split(blocks)
    tables = torch.zeros(max(len(lengths), 1), max(blocks, default=1), dtype=torch.int32)
    shape = (total, block_size, kv_heads, head_dim)
    key, value = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    for r, pages in enumerate(order):
        tables[r, : len(pages)] = pages
        slots = (pages[:, None] * block_size + torch.arange(block_size)).flatten()[: lengths[r]]
        for cache in (key, value):
            cache.view(-1, kv_heads, head_dim)[slots] = torch.randn(lengths[r], kv_heads, head_dim, generator=generator)
    positions = [random_positions(n, m, generator) for n, m in zip(lengths, counts, strict=True)]
    q = torch.randn(sum(counts), q_heads, head_dim, generator=generator) * 1.5
    start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return Problem(
        q.to(DEVICE, dtype),
        narrowed(key.to(DEVICE), cache_dtype or dtype),
        narrowed(value.to(DEVICE), cache_dtype or dtype),
        torch.cat(positions).to(DEVICE),
        start.to(DEVICE),
        tables.to(DEVICE),
        head_dim**-0.5,
    )


def gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` slots of a request, in order, as float64."""
    block_size = cache.shape[1]
    rows = gathered(cache, table[: -(-length // block_size)].long()).flatten(0, 1)[:length]
    return widened(rows, torch.float64)


def probabilities(
    p: Problem, request: int, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]:
    """Float64 probabilities [heads, queries, keys], lse [queries, heads], values [keys, heads, head_dim]; the rows."""
    rows = slice(int(p.query_start_loc[request]), int(p.query_start_loc[request + 1]))
    positions = p.positions[rows]
    length = int(positions[-1]) + 1
    group = p.q.shape[1] // p.key.shape[2]
    k, v = (gather(c, p.block_tables[request], length).repeat_interleave(group, 1) for c in (p.key, p.value))
    scores = torch.einsum("qhd,khd->hqk", p.q[rows].double(), k) * p.scale
    keys = torch.arange(length, device=DEVICE)
    seen = keys[None] <= positions[:, None]
    if window:
        seen &= keys[None] > positions[:, None] - window
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp(), lse.T, v, rows


def attention(p: Problem, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [tokens, q_heads, head_dim] and lse [tokens, q_heads], float64."""
    out = torch.empty(p.q.shape, dtype=torch.float64, device=DEVICE)
    lse_all = torch.empty(p.q.shape[:2], dtype=torch.float64, device=DEVICE)
    for request in range(p.query_start_loc.shape[0] - 1):
        if p.query_start_loc[request] == p.query_start_loc[request + 1]:
            continue
        prob, lse, v, rows = probabilities(p, request, window)
        out[rows] = torch.einsum("hqk,khd->qhd", prob, v)
        lse_all[rows] = lse
    return out, lse_all


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected; NaN when anything is NaN."""
    expected = expected.double()
    norm = expected.norm().item()
    difference: float = (actual.double() - expected).norm().item()
    return difference / (norm if norm else 1.0)


TOLERANCE = {torch.float16: 1.5e-3, torch.bfloat16: 8e-3}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} is above {tolerance:.0e}"
