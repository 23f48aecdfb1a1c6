"""Bindings of the kernels that sum attention for KV-Compress (csrc/cuda: window_sums, accumulate_sums), by the rules
of `ops.cuda_library`."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p

import torch

from vllm_blend.ops import cuda
from vllm_blend.ops.cuda_library import HEAD_DIMS, bound, cache_view, check, expect, rows_of, stream_of

_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES = {
    "vb_window_sums": (_P, _L, _P, _P, _P, _P, c_size_t, _I, _I, _I, _L, _F, _I, _P, _P),
    "vb_accumulate_splits": (_I, _I),
    "vb_accumulate_sums": (_P, _P, _L, _P, _L, _P, _P, _P, _P, _P, _I, _I, _I, _L, _F, _I, _P, _P),
}
_SIZES = {"vb_window_workspace_bytes": (_I,) * 4}

_functions = bound(_SIGNATURES, _SIZES)


def takes(q: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the kernels are to work on q [tokens, heads, head_dim] and a cache of any layout."""
    size = key_cache.shape[1]
    return (
        cuda.takes(q, q.shape[2])
        and q.shape[2] in HEAD_DIMS
        and key_cache.dtype == q.dtype
        and size >= 16
        and size & (size - 1) == 0
    )


def window_sums(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    n: int,
    query_positions: torch.Tensor,
    scale: float,
    power: int,
    buffer: int,
) -> torch.Tensor:
    """`ops.window_sums`."""
    functions, view = _functions(), cache_view(key_cache, key_cache)
    queries, heads, head_dim = q.shape
    sums = torch.zeros(heads, n, dtype=torch.float32, device=q.device)
    needed = functions.vb_window_workspace_bytes(queries, n, heads, head_dim)
    workspace = torch.empty(needed, dtype=torch.uint8, device=q.device)
    code = functions.vb_window_sums(
        rows_of(q, "q", key_cache.dtype), q.stride(0), expect(query_positions, "query_positions", torch.int64),
        expect(block_table, "block_table", torch.int32), sums.data_ptr(), workspace.data_ptr(), needed, queries, n,
        heads, buffer, scale, power, view.address, stream_of(q),
    )  # fmt: skip
    check("window_sums", code)
    return sums


def accumulate_sums(
    metric: torch.Tensor,
    q: torch.Tensor,
    head_keys: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    key_positions: torch.Tensor,
    query_positions: torch.Tensor,
    scale: float,
    power: int,
    buffer: int,
    lse: torch.Tensor | None = None,
) -> None:
    """`ops.accumulate_sums`. A launch depends on the shapes alone: captured into a graph, it fits every replay."""
    functions, view = _functions(), cache_view(head_keys, head_keys)
    rows, group, _ = q.shape
    splits = functions.vb_accumulate_splits(rows, tables.shape[1] * metric.shape[1])
    check("accumulate_sums", min(splits, 0))
    stats = None if lse is not None else torch.empty(rows, splits, group, 2, dtype=torch.float32, device=q.device)
    code = functions.vb_accumulate_sums(
        expect(metric, "metric", torch.float32), rows_of(q, "q", head_keys.dtype), q.stride(0),
        expect(tables, "tables", torch.int32, contiguous=False), tables.stride(0),
        expect(lengths, "lengths", torch.int64), expect(key_positions, "key_positions", torch.int32),
        expect(query_positions, "query_positions", torch.int64), None if stats is None else stats.data_ptr(),
        None if lse is None else expect(lse, "lse", torch.float32), rows, splits, group, buffer, scale, power,
        view.address, stream_of(q),
    )  # fmt: skip
    check("accumulate_sums", code)
