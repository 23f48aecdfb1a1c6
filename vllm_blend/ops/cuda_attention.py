"""Bindings of the attention kernels (csrc/cuda: prefill*, decode*, mass*), by the rules of `ops.cuda_library`.

Prefill and decode are planned once a step, on the device, and the plan serves every layer: what a layer adds to it is
pointers, written into an argument structure that the plan keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure, addressof
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Arguments, Cache, Float, Int, Int32, Int64, Size, Stream, fields_of
from vllm_blend.ops.cuda_library import (
    DTYPES,
    VARIANTS,
    CacheView,
    bound,
    cache_view,
    check,
    expect,
    rows_for,
    rows_of,
    stream_of,
)
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.paged_kv import PagedKV


class Prefill(Structure):
    """The arguments of prefill (VbPrefill)."""

    q: to.Query
    out: to.Out
    lse: to.LogSumExp | None
    positions: to.Positions
    query_start_loc: to.QueryStarts
    block_tables: to.BlockTables
    workspace: to.Workspace
    workspace_bytes: Size
    q_token_stride: Int64
    out_token_stride: Int64
    block_table_stride: Int32
    num_tokens: Int32
    num_requests: Int32
    q_heads: Int32
    window: Int32
    variant: Int32
    dtype: Int32
    scale: Float
    _fields_ = fields_of(__annotations__)


class Decode(Structure):
    """The arguments of decoding (VbDecode)."""

    q: to.Query
    out: to.Out
    lse: to.LogSumExp | None
    positions: to.Positions
    query_start_loc: to.QueryStarts | None
    block_tables: to.BlockTables
    workspace: to.Workspace
    workspace_bytes: Size
    q_token_stride: Int64
    out_token_stride: Int64
    block_table_stride: Int32
    num_requests: Int32
    q_heads: Int32
    window: Int32
    max_queries: Int32
    dtype: Int32
    scale: Float
    _fields_ = fields_of(__annotations__)


# fmt: off
class AttentionFunctions(Protocol):
    def prefill_workspace_bytes(
        self, num_tokens: Int, num_requests: Int, q_heads: Int, kv_heads: Int, head_dim: Int, /,
    ) -> Size: ...

    def prefill_plan(self, args: Arguments, cache: Cache, stream: Stream, /) -> Int: ...

    def prefill_attention(self, args: Arguments, cache: Cache, stream: Stream, /) -> Int: ...

    def decode_max_queries(self, q_heads: Int, kv_heads: Int, head_dim: Int, /) -> Int: ...

    def decode_workspace_bytes(self, args: Arguments, cache: Cache, /) -> Size: ...

    def decode_plan(self, args: Arguments, cache: Cache, stream: Stream, /) -> Int: ...

    def decode_attention(self, args: Arguments, cache: Cache, stream: Stream, /) -> Int: ...

    def merge_states(
        self, out_a: to.FirstOut, lse_a: to.FirstLogSumExp, out_b: to.SecondOut, lse_b: to.SecondLogSumExp, out: to.Out,
        lse: to.LogSumExp, rows: Int64, head_dim: Int, dtype: Int, stream: Stream, /,
    ) -> Int: ...

    def attention_mass(
        self, q: to.Query, q_token_stride: Int64, lse: to.LogSumExp, positions: to.Positions,
        block_tables: to.BlockTables, table_stride: Int64, requests: to.Requests | None, count: Int, mass: to.Mass,
        rows: Int, num_keys: Int, q_heads: Int, window: Int, scale: Float, variant: Int, dtype: Int, cache: Cache,
        stream: Stream, /,
    ) -> Int: ...
# fmt: on


functions: Callable[[], AttentionFunctions] = bound(AttentionFunctions)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The work of one step on the device, for every layer with queries and caches of one shape.

    It keeps alive what the kernels read: positions, offsets, tables and the workspace. A captured plan follows what
    these hold at each replay. One plan serves one thread at a time.
    """

    function: Callable[[Arguments, Cache, Stream], int]  # of the library: attends by this plan
    name: str
    shape: tuple[int, int, int]  # of the queries: tokens, heads, channels
    arguments: Prefill | Decode
    address: Arguments  # of `arguments`
    kept: tuple[torch.Tensor | None, ...]


def plan_prefill(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    kv: PagedKV,
    q_heads: int,
    sliding_window: int | None = None,
    variant: str = "auto",
) -> AttentionPlan:
    """Plan attention of positions [tokens] int64 (ascending in a request), rows query_start_loc [requests + 1] int32,
    block_tables [requests, max_blocks] int32. The plan holds for every layer with caches of this shape."""
    view = cache_view(kv)
    tokens, requests = positions.shape[0], query_start_loc.shape[0] - 1
    library = functions()
    needed = library.prefill_workspace_bytes(tokens, requests, q_heads, view.kv_heads, view.head_dim)
    workspace = torch.empty(needed, dtype=torch.uint8, device=positions.device)
    row = q_heads * view.head_dim
    plan = Prefill(q_token_stride=row, out_token_stride=row, variant=VARIANTS[variant], scale=1.0)
    plan.positions = expect(to.Positions, positions, "positions", torch.int64)
    plan.query_start_loc = expect(to.QueryStarts, query_start_loc, "query_start_loc", torch.int32)
    plan.block_tables = expect(to.BlockTables, block_tables, "block_tables", torch.int32, contiguous=False)
    plan.block_table_stride, plan.window = block_tables.stride(0), sliding_window or 0
    plan.num_tokens, plan.num_requests, plan.q_heads = tokens, requests, q_heads
    plan.workspace, plan.workspace_bytes = to.Workspace(workspace), needed
    address = Arguments(addressof(plan))
    check("plan_prefill", library.prefill_plan(address, view.address, stream_of(positions)))
    shape, kept = (tokens, q_heads, view.head_dim), (positions, query_start_loc, block_tables, workspace)
    return AttentionPlan(library.prefill_attention, "prefill_attention", shape, plan, address, kept)


def decode_max_queries(q_heads: int, kv_heads: int, head_dim: int) -> int:
    """Return how many queries a request may have for `plan_decode`. Up to so many, reading K and V is all that takes
    time."""
    return functions().decode_max_queries(q_heads, kv_heads, head_dim)


def plan_decode(
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    kv: PagedKV,
    q_heads: int,
    sliding_window: int | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_queries: int = 1,
) -> AttentionPlan:
    """Plan attention of one query a request, at positions [requests] int64, or of up to `max_queries`: rows
    query_start_loc [requests + 1] int32, positions ascending in a request. block_tables [requests, max_blocks] int32.

    The plan follows the positions on the device: captured into a graph with its layers, it fits every replay.
    """
    view = cache_view(kv)
    requests = block_tables.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    if block_tables.shape[0] != requests or (query_start_loc is None and positions.shape[0] != requests):
        raise ValueError(f"{positions.shape[0]} positions and {block_tables.shape[0]} block tables do not fit together")
    plan = Decode(max_queries=max_queries, scale=1.0)
    plan.positions = expect(to.Positions, positions, "positions", torch.int64)
    if query_start_loc is not None:
        plan.query_start_loc = expect(to.QueryStarts, query_start_loc, "query_start_loc", torch.int32)
    plan.block_tables = expect(to.BlockTables, block_tables, "block_tables", torch.int32, contiguous=False)
    plan.block_table_stride, plan.window = block_tables.stride(0), sliding_window or 0
    plan.num_requests, plan.q_heads = requests, q_heads
    library, address = functions(), Arguments(addressof(plan))
    needed = library.decode_workspace_bytes(address, view.address)
    workspace = torch.empty(needed, dtype=torch.uint8, device=positions.device)
    plan.workspace, plan.workspace_bytes = to.Workspace(workspace), needed
    check("plan_decode", library.decode_plan(address, view.address, stream_of(positions)))
    shape, kept = (positions.shape[0], q_heads, view.head_dim), (positions, query_start_loc, block_tables, workspace)
    return AttentionPlan(library.decode_attention, "decode_attention", shape, plan, address, kept)


def attention(
    q: torch.Tensor,
    kv: PagedKV,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of q [tokens, q_heads, head_dim] at the plan's positions, in out where given; lse [tokens,
    q_heads] float32 receives the natural log-sum-exp when given."""
    view = cache_view(kv)
    if out is None:
        out = torch.empty_like(q)
    stride, out_stride, dtype = q.stride(), out.stride(), q.dtype
    dim = view.head_dim
    if not (
        q.shape == out.shape == plan.shape
        and dtype == out.dtype
        and dtype in view.activations
        and stride[1] == out_stride[1] == dim
        and stride[2] == out_stride[2] == 1
        and q.is_cuda
        and out.is_cuda
    ):
        _refuse(q, out, view, plan)
    arguments = plan.arguments
    arguments.q, arguments.out = to.Query(q), to.Out(out)
    arguments.lse = None if lse is None else expect(to.LogSumExp, lse, "lse", torch.float32)
    arguments.q_token_stride, arguments.out_token_stride = stride[0], out_stride[0]
    arguments.dtype, arguments.scale = DTYPES[dtype], scale
    code = plan.function(plan.address, view.address, stream_of(q))
    if code:
        check(plan.name, code)
    return out


def _refuse(q: torch.Tensor, out: torch.Tensor, view: CacheView, plan: AttentionPlan) -> None:
    """Raise what is wrong with q or out. One token's strides mean nothing, and they need not be those of rows."""
    for tensor, name in ((q, "q"), (out, "out")):
        if tuple(tensor.shape) != plan.shape or plan.shape[2] != view.head_dim:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the plan is for {plan.shape}")
    rows_for(to.Query, q, "q", view)
    rows_of(to.Out, out, "out", q.dtype)


def attention_mass(
    q: torch.Tensor,
    lse: torch.Tensor,
    positions: torch.Tensor,
    kv: PagedKV,
    block_table: torch.Tensor,
    mass: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    variant: str = "auto",
) -> None:
    """Add to mass [kv_heads, num_keys] float32 the attention probability that each key gets from q [rows, q_heads,
    head_dim] of one request at positions [rows] int64, summed over rows, divided by q_heads: `mass.sum(0)`, once after
    all layers, is the mean over heads. Nothing is added in an order that varies.

    lse [rows, q_heads]: `attention`'s for the same q; infinite in rows that do not count.
    """
    view = cache_view(kv)
    code = functions().attention_mass(
        rows_for(to.Query, q, "q", view), q.stride(0), expect(to.LogSumExp, lse, "lse", torch.float32),
        expect(to.Positions, positions, "positions", torch.int64),
        expect(to.BlockTables, block_table, "block_table", torch.int32), 0, None, 1,
        expect(to.Mass, mass, "mass", torch.float32), q.shape[0], mass.shape[1], q.shape[1], sliding_window or 0, scale,
        VARIANTS[variant], DTYPES[q.dtype], view.address, stream_of(q),
    )  # fmt: skip
    check("attention_mass", code)


@dataclass(frozen=True, eq=False)
class MassPlan:
    """The requests of a step whose keys get mass, for every layer: `rows` of q of each, and its `masses`, [kv_heads,
    keys] float32. Requests without rows are left alone."""

    rows: Sequence[slice]
    masses: Sequence[torch.Tensor]

    @cached_property
    def requests(self) -> torch.Tensor:
        """Return what the kernel reads of each: its first row, how many rows and keys, and where its masses are from
        the first one's on, [requests, 4] int64."""
        start = self.masses[0].data_ptr()
        fields = [
            (rows.start, rows.stop - rows.start, mass.shape[1], (mass.data_ptr() - start) // mass.itemsize)
            for rows, mass in zip(self.rows, self.masses, strict=True)
        ]
        return to_device(np.array(fields, np.int64), self.masses[0].device)

    @cached_property
    def most(self) -> tuple[int, int]:
        """Return the most rows, and the most keys, of a request."""
        return max(rows.stop - rows.start for rows in self.rows), max(mass.shape[1] for mass in self.masses)


def attention_masses(
    q: torch.Tensor,
    lse: torch.Tensor,
    positions: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    plan: MassPlan,
    scale: float,
    sliding_window: int | None = None,
    variant: str = "auto",
) -> None:
    """Do `attention_mass` for several requests at once, with the same bits: q [tokens, q_heads, head_dim], lse [tokens,
    q_heads], positions [tokens] int64 and block_tables [requests, max_blocks] int32 of all of them."""
    view, (rows, keys) = cache_view(kv), plan.most
    for mass in plan.masses:
        expect(to.Mass, mass, "mass", torch.float32)
    code = functions().attention_mass(
        rows_for(to.Query, q, "q", view), q.stride(0), expect(to.LogSumExp, lse, "lse", torch.float32),
        expect(to.Positions, positions, "positions", torch.int64),
        expect(to.BlockTables, block_tables, "block_tables", torch.int32, False), block_tables.stride(0),
        to.Requests(plan.requests), len(plan.masses), to.Mass(plan.masses[0]), rows, keys, q.shape[1],
        sliding_window or 0, scale, VARIANTS[variant], DTYPES[q.dtype], view.address, stream_of(q),
    )  # fmt: skip
    check("attention_mass", code)
