"""Attention in parts: a part's output with its log-sum-exp, and the union of parts over disjoint sets of keys."""

from __future__ import annotations

import torch

from vllm_blend.ops import cpu, cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import CACHE_CODES, DTYPE_CODES, kernels_for, raise_status
from vllm_blend.ops.cuda_attention import functions
from vllm_blend.ops.cuda_library import DTYPES, check, expect, stream_of
from vllm_blend.ops.e4m3 import E4M3, gathered, widened
from vllm_blend.ops.paged_kv import PagedKV


def attention_states(
    q: torch.Tensor,
    kv: PagedKV,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention as in `paged_attention` of the few rows of decode steps, out like q [tokens, heads, head_dim]
    with lse [tokens, heads] float32, the natural logarithm of the sum of exponentials of the scaled scores. A row that
    sees no key gives zeros and -inf.

    The cache may have any distance between blocks: a view of a pool. In
    plain torch (see `attention_states_reference`) it may have any strides.
    """
    kernels = kernels_for(q)
    if kernels is None or min(seq_lens, default=0) <= 0 or not accepts_states(q, kv):
        return attention_states_reference(q, kv, positions, block_tables, query_start_loc, seq_lens, scale)
    # For the kernel, every row is a request of its own, and a cache with gaps one of more blocks, of which the tables
    # name some.
    q, q_stride = cpu.token_rows(q)
    tokens, heads, head_dim = q.shape
    step = kv.key.stride(0) // (kv.block_size * kv.kv_heads * head_dim)
    lengths, tables = torch.tensor(seq_lens), (block_tables * step).to(torch.int32)
    if query_start_loc != list(range(tokens + 1)):
        counts = torch.tensor(query_start_loc).diff()
        lengths, tables = lengths.repeat_interleave(counts), tables.repeat_interleave(counts, 0)
    positions, tables = torch.minimum(positions, lengths - 1), tables.contiguous()
    starts = torch.arange(tokens + 1)
    out = torch.empty_like(q, memory_format=cpu.CONTIGUOUS)
    lse = torch.empty(tokens, heads)
    status = kernels.attention_states(
        to.Out(out), to.LogSumExp(lse), to.Query(q), kv.key_address, kv.value_address, to.Positions(positions),
        to.BlockTables(tables), to.QueryStarts(starts), to.SeqLens(lengths), tokens, tables.shape[1],
        (kv.num_blocks - 1) * step + 1, kv.block_size, heads, kv.kv_heads, head_dim, q_stride, scale,
        DTYPE_CODES[q.dtype], CACHE_CODES[kv.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "attention_states")
    return out, lse


def accepts_states(q: torch.Tensor, kv: PagedKV) -> bool:
    """Return whether `attention_states` can work on q [tokens, heads, head_dim] and this cache: its blocks are in one
    piece each, and the distances between them are a multiple of a block."""
    head_dim, stride = q.shape[2], kv.key.stride()
    return (
        head_dim % 16 == 0
        and head_dim <= cpu.MAX_HEAD_DIM
        and kv.dtype in (q.dtype, E4M3)
        and kv.is_alike
        and stride == kv.value.stride()
        and stride[1:] == (kv.kv_heads * head_dim, head_dim, 1)
        and stride[0] % (kv.block_size * stride[1]) == 0
    )


def attention_states_reference(
    q: torch.Tensor,
    kv: PagedKV,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the plain torch twin of `attention_states`: one small product a request. float64 stays float64, lse too."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads, size = kv.kv_heads, kv.block_size
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    for request, n in enumerate(seq_lens):
        rows = slice(query_start_loc[request], query_start_loc[request + 1])
        m = rows.stop - rows.start
        if m == 0 or n == 0:
            continue
        blocks = block_tables[request, : -(-n // size)]
        k = widened(gathered(kv.key, blocks).flatten(0, 1)[:n], dtype).permute(1, 2, 0)  # [kv_heads, head_dim, n]
        v = widened(gathered(kv.value, blocks).flatten(0, 1)[:n], dtype).transpose(0, 1)
        grouped = q[rows].to(dtype).unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # by KV head
        scores = torch.bmm(grouped, k).mul_(scale).unflatten(1, (m, -1))  # [kv_heads, m, group, n]
        at = positions[rows]
        if not (q.is_cpu and int(at.min()) >= n - 1):  # on a GPU, asking whether all keys are seen would wait for it
            hidden = torch.arange(n, device=q.device)[None] > at[:, None]
            scores.masked_fill_(hidden[None, :, None], float("-inf"))
        sums = scores.logsumexp(-1)
        weights = scores.sub_(sums.clamp_min(torch.finfo(dtype).min)[..., None]).exp_()
        attended = torch.bmm(weights.flatten(1, 2), v).unflatten(1, (m, -1))
        out[rows] = attended.transpose(0, 1).flatten(1, 2)
        lse[rows] = sums.transpose(0, 1).flatten(1, 2)
    return out.to(q.dtype), lse


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the union of two disjoint sets of keys: outs [tokens, heads, head_dim] of one dtype, lses
    [tokens, heads] float32. A part without keys (-inf) adds nothing."""
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.shape != out_a.shape[:2]:
        raise ValueError(
            f"outs {tuple(out_a.shape)}, {tuple(out_b.shape)} and lses {tuple(lse_a.shape)}, {tuple(lse_b.shape)} "
            "do not fit together"
        )
    if not (cuda.accepts(out_a, out_a.shape[2]) and out_b.dtype == out_a.dtype):
        return merge_states_reference(out_a, lse_a, out_b, lse_b)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    code = functions().merge_states(
        expect(to.FirstOut, out_a, "out_a", out_a.dtype), expect(to.FirstLogSumExp, lse_a, "lse_a", torch.float32),
        expect(to.SecondOut, out_b, "out_b", out_a.dtype), expect(to.SecondLogSumExp, lse_b, "lse_b", torch.float32),
        to.Out(out), to.LogSumExp(lse), lse.numel(), out.shape[-1], DTYPES[out_a.dtype], stream_of(out_a),
    )  # fmt: skip
    check("merge_states", code)
    return out, lse


def merge_states_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the plain torch twin of `merge_states`."""
    lse = torch.logaddexp(lse_a, lse_b)
    top = lse.clamp_min(torch.finfo(lse.dtype).min)  # where both are empty
    a, b = (lse_a - top).exp()[..., None], (lse_b - top).exp()[..., None]
    return (out_a.to(lse.dtype) * a + out_b.to(lse.dtype) * b).to(out_a.dtype), lse
