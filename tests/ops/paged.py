"""Random paged-attention problems, and how the kernel tests run an op: one instruction set at a time, into poisoned
memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from vllm_blend.ops import bindings
from vllm_blend.ops.paged_kv import PagedKV

ISAS = bindings.cpu_isas()  # raises, and so fails the tests, when the kernels were not built
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEAD_DIMS = [16, 64, 80, 96, 128, 256]
# The error of one rounding to the storage dtype, doubled; float32 sums of a few hundred terms are allowed more than
# that.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@contextmanager
def kernels(isa: str) -> Iterator[None]:
    """Run ops on one instruction set. torch.empty gives memory full of NaN: an element left unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        with mock.patch.dict(os.environ, {bindings.ISA_VARIABLE: isa, bindings.DISABLE_VARIABLE: "0"}):
            bindings.reload()
            assert bindings.cpu_kernels().isa == isa
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        bindings.reload()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    """`actual`, computed from tensors of `dtype`, against a float64 result."""
    tolerance = TOLERANCE[dtype] * slack
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Problem:
    """A step over a paged cache; unused slots hold NaN, so that reading one spoils the result."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    window: int | None
    sinks: torch.Tensor | None = None

    def kv(self, dtype: torch.dtype) -> PagedKV:
        return PagedKV(self.key_cache.to(dtype), self.value_cache.to(dtype))

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return the arguments of `paged_attention`, floating-point tensors in `dtype`."""
        return (
            self.q.to(dtype),
            self.kv(dtype),
            self.positions,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
            self.scale,
            self.window,
            self.sinks,
        )

    def mass_arguments(self, dtype: torch.dtype, query_rows: list[slice]) -> tuple[Any, ...]:
        """Return the arguments of `attention_mass`."""
        return (
            self.q.to(dtype),
            self.kv(dtype),
            self.positions,
            self.block_tables,
            query_rows,
            self.seq_lens.tolist(),
            self.scale,
            self.window,
            self.sinks,
        )

    def rows(self) -> list[slice]:
        starts = self.query_start_loc.tolist()
        return [slice(a, b) for a, b in pairwise(starts)]


def build(
    lengths: list[int],
    queries: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    window: int | None = None,
    shared_blocks: int = 0,
    strided: bool = False,
    seed: int = 0,
) -> Problem:
    """Requests of `lengths` keys with `queries` scattered query positions each, on shuffled blocks.

    The first `shared_blocks` blocks of all requests are the same ones. One query means decode: it stands last. With
    `strided`, q is a slice of a wider matrix, as a packed QKV projection leaves it.
    """
    random = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    num_blocks = sum(counts) + 2
    free = torch.randperm(num_blocks, generator=random).tolist()
    tables = torch.zeros(len(lengths), max([*counts, 1]), dtype=torch.int32)
    shared = [free.pop() for _ in range(min(shared_blocks, max([*counts, 0])))]
    key_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"))
    value_cache = key_cache.clone()
    for request, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        # A block is shared only where it is full: two requests never fill one block differently.
        blocks = shared[: min(len(shared), n // block_size)]
        blocks = blocks + [free.pop() for _ in range(count - len(blocks))]
        tables[request, :count] = torch.tensor(blocks, dtype=torch.int32)
        for i, block in enumerate(blocks):
            slots = min(block_size, n - i * block_size)
            for cache in (key_cache, value_cache):
                cache[block, :slots] = torch.randn(slots, kv_heads, head_dim, generator=random)
    positions = [
        torch.tensor([n - 1]) if m == 1 else torch.randperm(n, generator=random)[:m].sort().values
        for n, m in zip(lengths, queries, strict=True)
    ]
    starts = torch.tensor([0, *queries]).cumsum(0)
    tokens = int(starts[-1])
    q = torch.randn(tokens, heads + 2 * strided, head_dim, generator=random).to(dtype)[:, :heads]
    return Problem(
        q,
        key_cache.to(dtype),
        value_cache.to(dtype),
        torch.cat([torch.zeros(0, dtype=torch.int64), *positions]),
        tables,
        starts,
        torch.tensor(lengths, dtype=torch.int64),
        head_dim**-0.5,
        window,
    )


@st.composite
def problems(draw: st.DrawFn, dtype: torch.dtype) -> Problem:
    """Prefill of any subset of positions, decode and idle requests, mixed."""
    lengths = draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    queries = [draw(st.one_of(st.just(1), st.integers(0, min(n, 90)))) for n in lengths]
    kv_heads = draw(st.integers(1, 3))
    return build(
        lengths,
        queries,
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        dtype=dtype,
        block_size=draw(st.sampled_from([1, 8, 16, 24, 32])),
        window=draw(st.one_of(st.none(), st.integers(1, 210))),
        shared_blocks=draw(st.integers(0, 3)),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
