"""Bindings of the kernels that sum attention for KV-Compress (csrc/cuda: window_sums, accumulate_sums), by the rules
of `ops.cuda_library`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from vllm_blend.features.kv_compress.sums import KeyRows, SumRule, WindowKeys
from vllm_blend.ops import cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.c_functions import Cache, Float, Int, Int64, Size, Stream
from vllm_blend.ops.cuda_library import DTYPES, HEAD_DIMS, bound, cache_view, check, expect, rows_for, stream_of
from vllm_blend.ops.paged_kv import PagedKV


# fmt: off
class SumsFunctions(Protocol):
    def window_workspace_bytes(self, rows: Int, num_keys: Int, q_heads: Int, head_dim: Int, /) -> Size: ...

    def window_sums(
        self, q: to.Query, q_token_stride: Int64, positions: to.Positions, block_table: to.BlockTables, sums: to.Sums,
        workspace: to.Workspace, workspace_bytes: Size, rows: Int, num_keys: Int, q_heads: Int, buffer: Int64,
        scale: Float, power: Int, dtype: Int, cache: Cache, stream: Stream, /,
    ) -> Int: ...

    def accumulate_splits(self, rows: Int, max_length: Int, /) -> Int: ...

    def accumulate_sums(
        self, metric: to.Metric, q: to.Query, q_row_stride: Int64, tables: to.BlockTables, table_stride: Int64,
        lengths: to.SeqLens, key_positions: to.KeyPositions, query_positions: to.Positions, stats: to.Stats | None,
        lse: to.LogSumExp | None, rows: Int, splits: Int, group: Int, buffer: Int64, scale: Float, power: Int,
        dtype: Int, cache: Cache, stream: Stream, /,
    ) -> Int: ...
# fmt: on


_functions: Callable[[], SumsFunctions] = bound(SumsFunctions)


def accepts(q: torch.Tensor, kv: PagedKV) -> bool:
    """Return whether the kernels are to work on q [tokens, heads, head_dim] and a cache of any layout."""
    size = kv.block_size
    return (
        cuda.accepts(q, q.shape[2])
        and q.shape[2] in HEAD_DIMS
        and cuda.fit(q.dtype, kv.dtype)
        and size >= 16
        and size & (size - 1) == 0
    )


def window_sums(q: torch.Tensor, kv: PagedKV, keys: WindowKeys, rule: SumRule) -> torch.Tensor:
    """Run `ops.window_sums` on the GPU."""
    block_table, n, query_positions = keys
    functions, view = _functions(), cache_view(kv)
    queries, heads, head_dim = q.shape
    sums = torch.zeros(heads, n, dtype=torch.float32, device=q.device)
    needed = functions.window_workspace_bytes(queries, n, heads, head_dim)
    workspace = torch.empty(needed, dtype=torch.uint8, device=q.device)
    code = functions.window_sums(
        rows_for(to.Query, q, "q", view), q.stride(0),
        expect(to.Positions, query_positions, "query_positions", torch.int64),
        expect(to.BlockTables, block_table, "block_table", torch.int32), to.Sums(sums), to.Workspace(workspace),
        needed, queries, n, heads, rule.buffer, rule.scale, rule.power, DTYPES[q.dtype], view.address, stream_of(q),
    )  # fmt: skip
    check("window_sums", code)
    return sums


def accumulate_sums(
    metric: torch.Tensor,
    q: torch.Tensor,
    kv: PagedKV,
    key_rows: KeyRows,
    rule: SumRule,
    lse: torch.Tensor | None = None,
) -> None:
    """Run `ops.accumulate_sums` on the GPU. A launch depends on the shapes alone: once captured into a graph, it fits
    every replay."""
    functions, view = _functions(), cache_view(kv)
    rows, group, _ = q.shape
    splits = functions.accumulate_splits(rows, key_rows.tables.shape[1] * metric.shape[1])
    check("accumulate_sums", min(splits, 0))
    stats = None if lse is not None else torch.empty(rows, splits, group, 2, dtype=torch.float32, device=q.device)
    code = functions.accumulate_sums(
        expect(to.Metric, metric, "metric", torch.float32), rows_for(to.Query, q, "q", view), q.stride(0),
        expect(to.BlockTables, key_rows.tables, "tables", torch.int32, contiguous=False), key_rows.tables.stride(0),
        expect(to.SeqLens, key_rows.lengths, "lengths", torch.int64),
        expect(to.KeyPositions, key_rows.key_positions, "key_positions", torch.int32),
        expect(to.Positions, key_rows.query_positions, "query_positions", torch.int64),
        None if stats is None else to.Stats(stats),
        None if lse is None else expect(to.LogSumExp, lse, "lse", torch.float32), rows, splits, group,
        rule.buffer, rule.scale, rule.power, DTYPES[q.dtype], view.address, stream_of(q),
    )  # fmt: skip
    check("accumulate_sums", code)
