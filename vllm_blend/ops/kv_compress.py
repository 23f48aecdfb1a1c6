"""How much attention cached keys receive, per KV head: what the metrics of KV-Compress are made of (Rehg, 2024)."""

from __future__ import annotations

import torch

from vllm_blend.ops import cpu, cuda_kv_compress
from vllm_blend.ops.attention import expect
from vllm_blend.ops.bindings import kernels_for

TILE_ELEMENTS = 1 << 26  # of the largest tensor that a twin makes at a time: 256 MiB in float32


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
    """What the first n keys of one request receive from w queries: [heads, n] float32, the sum over queries of
    p ** power, for p the causal softmax probability that a query head gives a key.

    q: [w, heads, head_dim] after RoPE, at query_positions [w] int64, in any order, each below n; key_cache:
    [num_blocks, block_size, kv_heads, head_dim], whose blocks block_table [W] int32 hold the keys in order of position;
    power: 1 or 2. A key nearer than `buffer` tokens (key position > query position - buffer) takes part in the softmax
    but receives nothing. Raises IndexError for a block or position out of range (on a CPU), ValueError for tensors that
    do not fit together.
    """
    _check_rule(power, buffer)
    heads, head_dim = q.shape[1:]
    kv_heads, cached_dim = key_cache.shape[2:]
    if head_dim != cached_dim or heads % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit a cache of {kv_heads} KV heads of {cached_dim}")
    expect(query_positions, "query_positions", torch.int64, (len(q),))
    expect(block_table, "block_table", torch.int32, tuple(block_table.shape))
    if n > block_table.numel() * key_cache.shape[1]:
        raise IndexError(
            f"block_table has {block_table.numel()} blocks of {key_cache.shape[1]}, too few for n={n} keys"
        )
    if cuda_kv_compress.takes(q, key_cache):
        return cuda_kv_compress.window_sums(q, key_cache, block_table, n, query_positions, scale, power, buffer)
    kernels = kernels_for(q)
    if kernels is not None and cpu.takes_attention(q, key_cache, key_cache):
        return cpu.window_sums(kernels, q, key_cache, block_table, n, query_positions, scale, power, buffer)
    return window_sums_reference(q, key_cache, block_table, n, query_positions, scale, power, buffer)


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
    """Add to `metric` [pages, block_size] float32, in place, what each key receives from the one query of its row: the
    sum over the row's query heads of p ** power, p the softmax probability over all keys of the row.

    A row is one KV head of one request: q [rows, group, head_dim] after RoPE at query_positions [rows] int64; its keys
    are the first lengths[row] ([rows] int64) slots of the pages tables[row] ([rows, W] int32) of head_keys [pages,
    block_size, 1, head_dim], in any order of position; key_positions [pages, block_size] int32 says which. A key with
    position > query position - buffer receives nothing. A row of length 0 is skipped. Rows share no page but page 0,
    which pads tables. Nothing waits for the device: it can be captured into a CUDA graph.

    `lse` [rows, group] float32: the natural log-sum-exp of a head's scores over all keys of the row, where attention
    has found it already: the keys are then read once and not twice. Raises IndexError for a page out of range (on a
    CPU), ValueError for tensors that do not fit together.
    """
    _check_rule(power, buffer)
    rows, group, head_dim = q.shape
    if head_keys.shape[2:] != (1, head_dim) or metric.shape != head_keys.shape[:2]:
        raise ValueError(
            f"q {tuple(q.shape)}, metric {tuple(metric.shape)} and head_keys {tuple(head_keys.shape)} do not fit "
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
    rule = (tables, lengths, key_positions, query_positions, scale, power, buffer)
    if metric.dtype == torch.float32 and cuda_kv_compress.takes(q, head_keys):
        return cuda_kv_compress.accumulate_sums(metric, q, head_keys, *rule, lse)
    kernels = kernels_for(q)
    if (
        lse is None
        and kernels is not None
        and metric.dtype == torch.float32
        and cpu.takes_attention(q, head_keys, head_keys)
    ):
        return cpu.accumulate_sums(kernels, metric, q, head_keys, *rule)
    return accumulate_sums_reference(metric, q, head_keys, *rule, lse)


def sums_take_lse(q: torch.Tensor, head_keys: torch.Tensor) -> bool:
    """Whether `accumulate_sums` is faster when it is told the log-sum-exp of the scores."""
    return cuda_kv_compress.takes(q, head_keys)


def window_sums_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    n: int,
    query_positions: torch.Tensor,
    scale: float,
    power: int,
    buffer: int,
) -> torch.Tensor:
    """The plain torch twin of `window_sums`, some KV heads at a time; float64 q gives float64 sums."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, heads, _ = q.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    if q.is_cpu and queries and not 0 <= int(query_positions.min()) <= int(query_positions.max()) < n:
        raise IndexError(f"query_positions {query_positions.tolist()} are not all within the {n} keys")
    out = torch.zeros(kv_heads, group, n, dtype=dtype, device=q.device)
    if not queries or not n:
        return out.flatten(0, 1)
    keys = key_cache[block_table[: -(-n // key_cache.shape[1])]].flatten(0, 1)[:n].permute(1, 2, 0)
    grouped = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [kv_heads, group * w, head_dim]
    behind = query_positions[:, None] - torch.arange(n, device=q.device)[None]
    hidden, too_near = behind < 0, behind < buffer
    step = max(1, TILE_ELEMENTS // (group * queries * n))
    for first in range(0, kv_heads, step):
        at = slice(first, first + step)
        scores = torch.bmm(grouped[at].to(dtype), keys[at].to(dtype)).mul_(scale).unflatten(1, (group, queries))
        received = scores.masked_fill_(hidden, float("-inf")).softmax(-1).masked_fill_(too_near, 0.0)
        out[at] = (received if power == 1 else received.square_()).sum(2)
    return out.flatten(0, 1)


def accumulate_sums_reference(
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
    """The plain torch twin of `accumulate_sums`, some rows at a time; float64 q gives float64 probabilities."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    block_size, width = metric.shape[1], tables.shape[1]
    if not width:
        return
    offsets = torch.arange(block_size, device=q.device)
    step = max(1, TILE_ELEMENTS // (width * block_size * q.shape[2]))
    for first in range(0, len(q), step):
        at = slice(first, first + step)
        pages = tables[at].long()
        keys = head_keys[pages].flatten(1, 3).to(dtype)  # [rows, width * block_size, head_dim]
        scores = torch.bmm(q[at].to(dtype), keys.transpose(1, 2)).mul_(scale)
        held = torch.arange(keys.shape[1], device=q.device)[None] < lengths[at, None]
        scores = scores.masked_fill_(~held[:, None], float("-inf"))
        received = scores.softmax(-1) if lse is None else (scores - lse[at, :, None]).exp_()
        sums = (received if power == 1 else received.square_()).sum(1)
        far = key_positions[pages].flatten(1) <= (query_positions[at] - buffer)[:, None]
        added = torch.where(held & far, sums, 0.0).to(metric.dtype)  # 0 wherever a table is padded
        metric.view(-1).index_add_(0, (pages[:, :, None] * block_size + offsets).flatten(), added.flatten())


def _check_rule(power: int, buffer: int) -> None:
    if power not in (1, 2):
        raise ValueError(f"power must be 1 or 2, got {power}")
    if buffer < 0:
        raise ValueError(f"buffer must be at least 0, got {buffer}")
