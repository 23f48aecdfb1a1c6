"""Bindings of the kernels that sum attention for KV-Compress (csrc/cuda: window_sums, accumulate_sums); the rules of
`ops.cuda` hold here too."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch

from vllm_blend.ops import cuda
from vllm_blend.ops.cuda import HEAD_DIMS, _check, _expect, _library, _rows, _stream, cache_view

_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "vb_window_workspace_bytes": ((_I,) * 4, c_size_t),
    "vb_window_sums": ((_P, _L, _P, _P, _P, _P, c_size_t, _I, _I, _I, _L, _F, _I, _P, _P), _I),
    "vb_accumulate_splits": ((_I, _I), _I),
    "vb_accumulate_sums": ((_P, _P, _L, _P, _L, _P, _P, _P, _P, _P, _I, _I, _I, _L, _F, _I, _P, _P), _I),
}


@cache
def _functions() -> ctypes.CDLL:
    lib = _library()
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, result
    return lib


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
        _rows(q, "q", key_cache.dtype), q.stride(0), _expect(query_positions, "query_positions", torch.int64),
        _expect(block_table, "block_table", torch.int32), sums.data_ptr(), workspace.data_ptr(), needed, queries, n,
        heads, buffer, scale, power, view.address, _stream(q),
    )  # fmt: skip
    _check("window_sums", code)
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
    _check("accumulate_sums", min(splits, 0))
    stats = None if lse is not None else torch.empty(rows, splits, group, 2, dtype=torch.float32, device=q.device)
    code = functions.vb_accumulate_sums(
        _expect(metric, "metric", torch.float32), _rows(q, "q", head_keys.dtype), q.stride(0),
        _expect(tables, "tables", torch.int32, contiguous=False), tables.stride(0),
        _expect(lengths, "lengths", torch.int64), _expect(key_positions, "key_positions", torch.int32),
        _expect(query_positions, "query_positions", torch.int64), None if stats is None else stats.data_ptr(),
        None if lse is None else _expect(lse, "lse", torch.float32), rows, splits, group, buffer, scale, power,
        view.address, _stream(q),
    )  # fmt: skip
    _check("accumulate_sums", code)
