"""How much attention cached keys receive, per KV head: what the metrics of KV-Compress are made of (Rehg, 2024)."""

from __future__ import annotations

import torch

from vllm_blend.features.kv_compress import cpu_ops
from vllm_blend.features.kv_compress import cuda_ops as cuda_kv_compress
from vllm_blend.features.kv_compress.sums import KeyRows, SumRule, WindowKeys
from vllm_blend.ops import cpu
from vllm_blend.ops.attention import expect
from vllm_blend.ops.bindings import kernels_for
from vllm_blend.ops.e4m3 import gathered, widened
from vllm_blend.ops.paged_kv import PagedKV

TILE_ELEMENTS = 1 << 26  # of the largest tensor that a twin makes at a time: 256 MiB in float32


def window_sums(q: torch.Tensor, kv: PagedKV, keys: WindowKeys, rule: SumRule) -> torch.Tensor:
    """Return what the first n keys of one request receive from w queries, by the rule: [heads, n] float32, summed over
    queries.

    q [w, heads, head_dim] is after RoPE. Raises IndexError for a block or position out of range (on a CPU), ValueError
    for tensors that do not fit together.
    """
    rule.check()
    block_table, n, query_positions = keys
    heads, head_dim = q.shape[1:]
    if head_dim != kv.head_dim or heads % kv.kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit a cache of {kv.kv_heads} KV heads of {kv.head_dim}")
    expect(query_positions, "query_positions", torch.int64, (len(q),))
    expect(block_table, "block_table", torch.int32, tuple(block_table.shape))
    if n > block_table.numel() * kv.block_size:
        raise IndexError(f"block_table has {block_table.numel()} blocks of {kv.block_size}, too few for n={n} keys")
    if cuda_kv_compress.accepts(q, kv):
        return cuda_kv_compress.window_sums(q, kv, keys, rule)
    kernels = kernels_for(q)
    if kernels is not None and cpu.accepts_attention(q, kv):
        return cpu_ops.window_sums(kernels, q, kv, keys, rule)
    return window_sums_reference(q, kv, keys, rule)


def accumulate_sums(
    metric: torch.Tensor,
    q: torch.Tensor,
    kv: PagedKV,
    key_rows: KeyRows,
    rule: SumRule,
    lse: torch.Tensor | None = None,
) -> None:
    """Add to `metric` [pages, block_size] float32, in place, what each key receives from the one query of its row, by
    the rule, summed over the row's query heads.

    q [rows, group, head_dim] is after RoPE; kv is [pages, block_size, 1, head_dim]. A row of length 0 is skipped.
    Nothing waits for the device: it can be captured into a CUDA graph.

    `lse` [rows, group] float32: the natural log-sum-exp of a head's scores over all keys of the row, where attention
    has found it already: the keys are then read once and not twice. Raises IndexError for a page out of range (on a
    CPU), ValueError for tensors that do not fit together.
    """
    rule.check()
    rows, group, head_dim = q.shape
    tables, lengths, key_positions, query_positions = key_rows
    if kv.key.shape[2:] != (1, head_dim) or metric.shape != kv.key.shape[:2]:
        raise ValueError(
            f"q {tuple(q.shape)}, metric {tuple(metric.shape)} and keys {tuple(kv.key.shape)} do not fit "
            "together: pages are [pages, block_size, 1, head_dim]"
        )
    expect(key_positions, "key_positions", torch.int32, tuple(metric.shape))
    expect(lengths, "lengths", torch.int64, (rows,))
    expect(query_positions, "query_positions", torch.int64, (rows,))
    if lse is not None:
        expect(lse, "lse", torch.float32, (rows, group))
    if not metric.is_contiguous():
        raise ValueError("metric must be contiguous: it is added to in place")
    if tables.dtype != torch.int32 or tables.dim() != 2 or len(tables) != rows or tables.stride(1) != 1:
        raise ValueError(f"tables must be int32 [{rows}, W] with rows in one piece, not {tables.dtype} {tables.shape}")
    if metric.dtype == torch.float32 and cuda_kv_compress.accepts(q, kv):
        return cuda_kv_compress.accumulate_sums(metric, q, kv, key_rows, rule, lse)
    kernels = kernels_for(q)
    if lse is None and kernels is not None and metric.dtype == torch.float32 and cpu.accepts_attention(q, kv):
        return cpu_ops.accumulate_sums(kernels, metric, q, kv, key_rows, rule)
    return accumulate_sums_reference(metric, q, kv, key_rows, rule, lse)


def sums_take_lse(q: torch.Tensor, kv: PagedKV) -> bool:
    """Return whether `accumulate_sums` is faster when it is told the log-sum-exp of the scores."""
    return cuda_kv_compress.accepts(q, kv)


def window_sums_reference(q: torch.Tensor, kv: PagedKV, keys: WindowKeys, rule: SumRule) -> torch.Tensor:
    """Compute `window_sums` in plain torch, some KV heads at a time; float64 q gives float64 sums."""
    block_table, n, query_positions = keys
    scale, power, buffer = rule
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, heads, _ = q.shape
    kv_heads = kv.kv_heads
    group = heads // kv_heads
    if q.is_cpu and queries and not 0 <= int(query_positions.min()) <= int(query_positions.max()) < n:
        raise IndexError(f"query_positions {query_positions.tolist()} are not all within the {n} keys")
    out = torch.zeros(kv_heads, group, n, dtype=dtype, device=q.device)
    if not queries or not n:
        return out.flatten(0, 1)
    stored = gathered(kv.key, block_table[: -(-n // kv.block_size)]).flatten(0, 1)[:n].permute(1, 2, 0)
    grouped = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group * w, head_dim]
    behind = query_positions[:, None] - torch.arange(n, device=q.device)[None]
    hidden, too_near = behind < 0, behind < buffer
    step = max(1, TILE_ELEMENTS // (group * queries * n))
    for first in range(0, kv_heads, step):
        at = slice(first, first + step)
        scores = torch.bmm(grouped[at].to(dtype), widened(stored[at], dtype))
        scores = scores.mul_(scale).unflatten(1, (group, queries))
        received = scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(too_near, 0.0)
        out[at] = (received if power == 1 else received.square_()).sum(2)
    return out.flatten(0, 1)


def accumulate_sums_reference(
    metric: torch.Tensor,
    q: torch.Tensor,
    kv: PagedKV,
    key_rows: KeyRows,
    rule: SumRule,
    lse: torch.Tensor | None = None,
) -> None:
    """Compute `accumulate_sums` in plain torch, some rows at a time; float64 q gives float64 probabilities."""
    tables, lengths, key_positions, query_positions = key_rows
    scale, power, buffer = rule
    dtype = torch.promote_types(q.dtype, torch.float32)
    block_size, width = metric.shape[1], tables.shape[1]
    if not width:
        return
    offsets = torch.arange(block_size, device=q.device)
    step = max(1, TILE_ELEMENTS // (width * block_size * q.shape[2]))
    for first in range(0, len(q), step):
        at = slice(first, first + step)
        pages = tables[at].long()
        keys = widened(gathered(kv.key, pages).flatten(1, 3), dtype)  # [rows, width * block_size, head_dim]
        scores = torch.bmm(q[at].to(dtype), keys.transpose(1, 2)).mul_(scale)
        held = torch.arange(keys.shape[1], device=q.device)[None] < lengths[at, None]
        scores = scores.masked_fill_(~held[:, None], float("-inf"))
        received = scores.softmax(-1) if lse is None else (scores - lse[at, :, None]).exp_()
        sums = (received if power == 1 else received.square_()).sum(1)
        far = key_positions[pages].flatten(1) <= (query_positions[at] - buffer)[:, None]
        added = torch.where(held & far, sums, 0.0).to(metric.dtype)  # 0 wherever a table is padded
        metric.view(-1).index_add_(0, (pages[:, :, None] * block_size + offsets).flatten(), added.flatten())
