"""Bindings of the attention kernels (csrc/cuda: prefill*, decode*, mass*), by the rules of `ops.cuda_library`.

Prefill and decode are planned once a step, on the device, and the plan serves every layer: what a layer adds to it is
pointers, written into an argument structure that the plan keeps.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from vllm_blend.ops.cuda_library import (
    VARIANTS,
    CacheView,
    bound,
    cache_view,
    check,
    dtype_code,
    expect,
    rows_of,
    stream_of,
)


class _Prefill(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("q", "out", "lse", "positions", "query_start_loc", "block_tables", "workspace")]
        + [("workspace_bytes", c_size_t)]
        + [(n, c_int64) for n in ("q_token_stride", "out_token_stride")]
        + [(n, c_int32) for n in ("block_table_stride", "num_tokens", "num_requests", "q_heads", "window", "variant")]
        + [("scale", c_float)]
    )


class _Decode(Structure):
    _fields_ = (
        [(n, c_void_p) for n in ("q", "out", "lse", "positions", "query_start_loc", "block_tables", "workspace")]
        + [("workspace_bytes", c_size_t)]
        + [(n, c_int64) for n in ("q_token_stride", "out_token_stride")]
        + [(n, c_int32) for n in ("block_table_stride", "num_requests", "q_heads", "window", "max_queries")]
        + [("scale", c_float)]
    )


_P, _I, _L, _F = c_void_p, c_int, c_int64, c_float
_SIGNATURES = {
    "vb_prefill_plan": (_P, _P, _P),
    "vb_prefill_attention": (_P, _P, _P),
    "vb_decode_max_queries": (_I,) * 3,
    "vb_decode_plan": (_P, _P, _P),
    "vb_decode_attention": (_P, _P, _P),
    "vb_merge_states": (_P, _P, _P, _P, _P, _P, _L, _I, _I, _P),
    "vb_attention_mass": (_P, _L, _P, _P, _P, _P, _I, _I, _I, _I, _F, _I, _P, _P),
}
_SIZES = {"vb_prefill_workspace_bytes": (_I,) * 5, "vb_decode_workspace_bytes": (_P, _P)}

_functions = bound(_SIGNATURES, _SIZES)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """The work of one step on the device, for every layer with queries and caches of one shape.

    It keeps alive what the kernels read: positions, offsets, tables and the workspace. A captured plan follows what
    these hold at each replay. One plan serves one thread at a time.
    """

    function: Any  # of the library: attends by this plan
    name: str
    shape: tuple[int, int, int]  # of the queries: tokens, heads, channels
    arguments: _Prefill | _Decode
    address: int  # of `arguments`
    kept: tuple[torch.Tensor | None, ...]


def _plan(
    name: str, arguments: _Prefill | _Decode, shape: tuple[int, int, int], *kept: torch.Tensor | None
) -> AttentionPlan:
    function = getattr(_functions(), f"vb_{name}_attention")
    return AttentionPlan(function, f"{name}_attention", shape, arguments, addressof(arguments), kept)


def prefill_workspace_bytes(num_tokens: int, num_requests: int, q_heads: int, kv_heads: int, head_dim: int) -> int:
    return int(_functions().vb_prefill_workspace_bytes(num_tokens, num_requests, q_heads, kv_heads, head_dim))


def plan_prefill(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_tables: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    q_heads: int,
    sliding_window: int | None = None,
    variant: str = "auto",
    workspace: torch.Tensor | None = None,
) -> AttentionPlan:
    """Plan attention of positions [tokens] int64 (ascending in a request), rows query_start_loc [requests + 1] int32,
    block_tables [requests, max_blocks] int32. The plan holds for every layer with caches of this shape. `workspace`
    (uint8, `prefill_workspace_bytes`) may be given to reuse one; a plan is void once another uses its workspace."""
    view = cache_view(key_cache, value_cache)
    tokens, requests = positions.shape[0], query_start_loc.shape[0] - 1
    if workspace is None:
        needed = prefill_workspace_bytes(tokens, requests, q_heads, view.kv_heads, view.head_dim)
        workspace = torch.empty(needed, dtype=torch.uint8, device=positions.device)
    row = q_heads * view.head_dim
    arguments = _Prefill(
        None, None, None, expect(positions, "positions", torch.int64),
        expect(query_start_loc, "query_start_loc", torch.int32),
        expect(block_tables, "block_tables", torch.int32, contiguous=False), workspace.data_ptr(), workspace.numel(),
        row, row, block_tables.stride(0), tokens, requests, q_heads, sliding_window or 0, VARIANTS[variant], 1.0,
    )  # fmt: skip
    code = _functions().vb_prefill_plan(addressof(arguments), view.address, stream_of(positions))
    check("plan_prefill", code)
    shape = (tokens, q_heads, view.head_dim)
    return _plan("prefill", arguments, shape, positions, query_start_loc, block_tables, workspace)


def decode_max_queries(q_heads: int, kv_heads: int, head_dim: int) -> int:
    """How many queries a request may have for `plan_decode`. Up to so many, reading K and V is all that takes time."""
    return int(_functions().vb_decode_max_queries(q_heads, kv_heads, head_dim))


def plan_decode(
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    q_heads: int,
    sliding_window: int | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_queries: int = 1,
) -> AttentionPlan:
    """Plan attention of one query a request, at positions [requests] int64, or of up to `max_queries`: rows
    query_start_loc [requests + 1] int32, positions ascending in a request. block_tables [requests, max_blocks] int32.

    The plan follows the positions on the device: captured into a graph with its layers, it fits every replay.
    """
    view = cache_view(key_cache, value_cache)
    requests = block_tables.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    if block_tables.shape[0] != requests or (query_start_loc is None and positions.shape[0] != requests):
        raise ValueError(f"{positions.shape[0]} positions and {block_tables.shape[0]} block tables do not fit together")
    arguments = _Decode(
        None, None, None, expect(positions, "positions", torch.int64),
        None if query_start_loc is None else expect(query_start_loc, "query_start_loc", torch.int32),
        expect(block_tables, "block_tables", torch.int32, contiguous=False), None, 0, 0, 0, block_tables.stride(0),
        requests, q_heads, sliding_window or 0, max_queries, 1.0,
    )  # fmt: skip
    functions = _functions()
    needed = functions.vb_decode_workspace_bytes(addressof(arguments), view.address)
    workspace = torch.empty(needed, dtype=torch.uint8, device=positions.device)
    arguments.workspace, arguments.workspace_bytes = workspace.data_ptr(), needed
    code = functions.vb_decode_plan(addressof(arguments), view.address, stream_of(positions))
    check("plan_decode", code)
    shape = (positions.shape[0], q_heads, view.head_dim)
    return _plan("decode", arguments, shape, positions, query_start_loc, block_tables, workspace)


def attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [tokens, q_heads, head_dim] at the plan's positions -> out, like q; lse [tokens, q_heads] float32
    receives the natural log-sum-exp when given."""
    view = cache_view(key_cache, value_cache)
    if out is None:
        out = torch.empty_like(q)
    stride, out_stride = q.stride(), out.stride()
    dim = view.head_dim
    if not (
        q.shape == out.shape == plan.shape
        and q.dtype == out.dtype == view.torch_dtype
        and stride[1] == out_stride[1] == dim
        and stride[2] == out_stride[2] == 1
        and q.is_cuda
        and out.is_cuda
    ):
        _refuse(q, out, view, plan)
    arguments = plan.arguments
    arguments.q, arguments.out = q.data_ptr(), out.data_ptr()
    arguments.lse = None if lse is None else expect(lse, "lse", torch.float32)
    arguments.q_token_stride, arguments.out_token_stride = stride[0], out_stride[0]
    arguments.scale = scale
    code = plan.function(plan.address, view.address, stream_of(q))
    if code:
        check(plan.name, code)
    return out


def _refuse(q: torch.Tensor, out: torch.Tensor, view: CacheView, plan: AttentionPlan) -> None:
    """Raise what is wrong with q or out. One token's strides mean nothing, and they need not be those of rows."""
    for tensor, name in ((q, "q"), (out, "out")):
        if tuple(tensor.shape) != plan.shape or plan.shape[2] != view.head_dim:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the plan is for {plan.shape}")
        rows_of(tensor, name, view.torch_dtype)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets: outs [tokens, heads, head_dim], lses [tokens, heads]."""
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    code = _functions().vb_merge_states(
        expect(out_a, "out_a", out_a.dtype), expect(lse_a, "lse_a", torch.float32),
        expect(out_b, "out_b", out_a.dtype), expect(lse_b, "lse_b", torch.float32),
        out.data_ptr(), lse.data_ptr(), lse.numel(), out.shape[-1], dtype_code(out_a, "out_a"), stream_of(out_a),
    )  # fmt: skip
    check("merge_states", code)
    return out, lse


def attention_mass(
    q: torch.Tensor,
    lse: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mass: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    variant: str = "auto",
) -> None:
    """mass [kv_heads, num_keys] float32 += attention probability each key gets from q [rows, q_heads, head_dim] of one
    request at positions [rows] int64, summed over rows, divided by q_heads: `mass.sum(0)`, once after all
    layers, is the mean over heads. Nothing is added in an order that varies.

    lse [rows, q_heads]: `attention`'s for the same q; infinite in rows that do not count.
    """
    view = cache_view(key_cache, value_cache)
    code = _functions().vb_attention_mass(
        rows_of(q, "q", key_cache.dtype), q.stride(0), expect(lse, "lse", torch.float32),
        expect(positions, "positions", torch.int64), expect(block_table, "block_table", torch.int32),
        expect(mass, "mass", torch.float32), q.shape[0], mass.shape[1], q.shape[1], sliding_window or 0, scale,
        VARIANTS[variant], view.address, stream_of(q),
    )  # fmt: skip
    check("attention_mass", code)
