"""Random problems for the sums of attention that KV-Compress ranks by, and dense float64 answers to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from tests.ops.paged import HEAD_DIMS
from vllm_blend.features.kv_compress.sums import KeyRows, SumRule, WindowKeys
from vllm_blend.ops.paged_kv import PagedKV


@dataclass(frozen=True)
class WindowProblem:
    """One request's last queries over its blocks; unused slots hold NaN."""

    q: torch.Tensor  # [w, heads, head_dim]
    key_cache: torch.Tensor
    block_table: torch.Tensor
    n: int
    positions: torch.Tensor
    scale: float
    power: int
    buffer: int

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        keys = self.key_cache.to(dtype)
        floats = (self.q.to(dtype), PagedKV(keys, keys))  # of a cache, these ops read the keys alone
        return (
            *floats,
            WindowKeys(self.block_table, self.n, self.positions),
            SumRule(self.scale, self.power, self.buffer),
        )

    def expected(self) -> torch.Tensor:
        """[heads, n] float64, query by query."""
        w, heads, _ = self.q.shape
        size, kv_heads = self.key_cache.shape[1:3]
        at = torch.arange(self.n)
        keys = self.key_cache.double()[self.block_table.long()[at // size], at % size]  # [n, kv_heads, head_dim]
        sums = torch.zeros(heads, self.n, dtype=torch.float64)
        for i in range(w):
            position = int(self.positions[i])
            for head in range(heads):
                scores = keys[: position + 1, head // (heads // kv_heads)] @ self.q[i, head].double() * self.scale
                reach = max(0, position - self.buffer + 1)
                sums[head, :reach] += scores.softmax(0)[:reach] ** self.power
        return sums


def window_problem(
    n: int,
    w: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    power: int = 2,
    buffer: int = 0,
    scattered: bool = False,
    strided: bool = False,
    seed: int = 0,
) -> WindowProblem:
    """The last w of n tokens, or any w of them; with `strided`, q is a slice of a packed projection."""
    random = torch.Generator().manual_seed(seed)
    blocks = -(-n // block_size)
    cache = torch.full((blocks + 2, block_size, kv_heads, head_dim), float("nan"))
    table = torch.randperm(blocks + 2, generator=random)[:blocks]
    for i, block in enumerate(table.tolist()):
        held = min(block_size, n - i * block_size)
        cache[block, :held] = torch.randn(held, kv_heads, head_dim, generator=random)
    positions = torch.randperm(n, generator=random)[:w] if scattered else torch.arange(n - w, n)
    q = torch.randn(w, heads + 2 * strided, head_dim, generator=random).to(dtype)[:, :heads]
    return WindowProblem(q, cache.to(dtype), table.int(), n, positions, head_dim**-0.5, power, buffer)


@st.composite
def window_problems(draw: st.DrawFn, dtype: torch.dtype) -> WindowProblem:
    n = draw(st.integers(1, 400))
    kv_heads = draw(st.integers(1, 3))
    return window_problem(
        n,
        draw(st.integers(0, min(n, 40))),
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        dtype=dtype,
        block_size=draw(st.sampled_from([1, 8, 16, 24, 32])),
        power=draw(st.sampled_from([1, 2])),
        buffer=draw(st.one_of(st.just(0), st.integers(0, 450))),
        scattered=draw(st.booleans()),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class DecodeProblem:
    """Rows (KV heads of requests) over head pages; keys in unused slots are NaN, positions in a row are shuffled."""

    metric: torch.Tensor
    q: torch.Tensor  # [rows, group, head_dim]
    head_keys: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    key_positions: torch.Tensor
    query_positions: torch.Tensor
    scale: float
    power: int
    buffer: int

    def arguments(self, dtype: torch.dtype, metric: torch.Tensor) -> tuple[Any, ...]:
        keys = self.head_keys.to(dtype)
        floats = (metric, self.q.to(dtype), PagedKV(keys, keys))
        key_rows = KeyRows(self.tables, self.lengths, self.key_positions, self.query_positions)
        return (*floats, key_rows, SumRule(self.scale, self.power, self.buffer))

    def rows(self, rows: slice) -> DecodeProblem:
        """The same with these rows only."""
        names = ("q", "tables", "lengths", "query_positions")
        return replace(self, **{name: getattr(self, name)[rows].contiguous() for name in names})

    def lse(self) -> torch.Tensor:
        """The log-sum-exp of every head's scores, [rows, group] float32; infinite where a row has no key."""
        size, found = self.metric.shape[1], torch.full(self.q.shape[:2], torch.inf)
        for row, length in enumerate(self.lengths.tolist()):
            if length:
                at = torch.arange(length)
                keys = self.head_keys[self.tables[row].long()[at // size], at % size, 0].double()
                found[row] = (self.q[row].double() @ keys.T * self.scale).logsumexp(1).float()
        return found

    def expected(self) -> torch.Tensor:
        """The metric afterwards, float64, row by row."""
        metric, size = self.metric.double().clone(), self.metric.shape[1]
        for row, length in enumerate(self.lengths.tolist()):
            slots = [(int(self.tables[row, i // size]), i % size) for i in range(length)]
            if not slots:
                continue
            keys = torch.stack([self.head_keys[page, slot, 0].double() for page, slot in slots])
            received = ((self.q[row].double() @ keys.T * self.scale).softmax(1) ** self.power).sum(0)
            for i, (page, slot) in enumerate(slots):
                if int(self.key_positions[page, slot]) <= int(self.query_positions[row]) - self.buffer:
                    metric[page, slot] += received[i]
        return metric


def decode_problem(
    lengths: list[int],
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    power: int = 2,
    buffer: int = 0,
    spare_width: int = 0,
    seed: int = 0,
) -> DecodeProblem:
    """Rows of `lengths` KVs each on shuffled pages; page 0 pads tables, which are `spare_width` wider than needed."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    pages = sum(counts) + 3
    free = (torch.randperm(pages - 1, generator=random) + 1).tolist()
    tables = torch.zeros(len(lengths), max([*counts, 0]) + spare_width, dtype=torch.int32)
    keys = torch.full((pages, block_size, 1, head_dim), float("nan"))
    positions = torch.zeros(pages, block_size, dtype=torch.int32)
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        used = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(used, dtype=torch.int32)
        order = torch.randperm(2 * n, generator=random)[:n]  # of a request twice as long
        for i, page in enumerate(used):
            held = min(block_size, n - i * block_size)
            keys[page, :held, 0] = torch.randn(held, head_dim, generator=random)
            positions[page, :held] = order[i * block_size : i * block_size + held].int()
    return DecodeProblem(
        torch.rand(pages, block_size, generator=random),
        torch.randn(len(lengths), group, head_dim, generator=random).to(dtype),
        keys.to(dtype),
        tables,
        torch.tensor(lengths, dtype=torch.int64),
        positions,
        torch.tensor([max(0, 2 * n - 1) for n in lengths], dtype=torch.int64),
        head_dim**-0.5,
        power,
        buffer,
    )


@st.composite
def decode_problems(draw: st.DrawFn, dtype: torch.dtype) -> DecodeProblem:
    return decode_problem(
        draw(st.lists(st.integers(0, 150), max_size=6)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        dtype=dtype,
        block_size=draw(st.sampled_from([1, 8, 16, 24, 32])),
        power=draw(st.sampled_from([1, 2])),
        buffer=draw(st.one_of(st.just(0), st.integers(0, 320))),
        spare_width=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**16)),
    )
