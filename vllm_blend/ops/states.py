"""Attention in parts: a part's output with its log-sum-exp, and the union of parts over disjoint sets of keys."""

from __future__ import annotations

import torch

from vllm_blend.ops import cpu, cuda, cuda_attention
from vllm_blend.ops.bindings import kernels_for


def attention_states(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as in `paged_attention` of the few rows of decode steps, out like q [tokens, heads, head_dim] with lse
    [tokens, heads] float32, the natural logarithm of the sum of exponentials of the scaled scores. A row that sees no
    key gives zeros and -inf.

    The caches [num_blocks, block_size, kv_heads, head_dim] may have any distance between blocks: views of a pool. In
    plain torch (see `attention_states_reference`) they may have any strides.
    """
    kernels = kernels_for(q)
    if kernels is not None and min(seq_lens, default=0) > 0 and cpu.takes_states(q, key_cache, value_cache):
        states = (positions, block_tables, query_start_loc, seq_lens, scale)
        return cpu.attention_states(kernels, q, key_cache, value_cache, *states)
    return attention_states_reference(
        q, key_cache, value_cache, positions, block_tables, query_start_loc, seq_lens, scale
    )


def attention_states_reference(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: list[int],
    seq_lens: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain torch twin of `attention_states`: one small product a request. float64 stays float64, in lse too."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    kv_heads, size = key_cache.shape[2], key_cache.shape[1]
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    for request, n in enumerate(seq_lens):
        rows = slice(query_start_loc[request], query_start_loc[request + 1])
        m = rows.stop - rows.start
        if m == 0 or n == 0:
            continue
        blocks = block_tables[request, : -(-n // size)]
        k = key_cache[blocks].flatten(0, 1)[:n].to(dtype).permute(1, 2, 0)  # [kv_heads, head_dim, n]
        v = value_cache[blocks].flatten(0, 1)[:n].to(dtype).transpose(0, 1)
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
    """Attention over the union of two disjoint sets of keys: outs [tokens, heads, head_dim] of one dtype, lses [tokens,
    heads] float32. A part without keys (-inf) adds nothing."""
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.shape != out_a.shape[:2]:
        raise ValueError(
            f"outs {tuple(out_a.shape)}, {tuple(out_b.shape)} and lses {tuple(lse_a.shape)}, {tuple(lse_b.shape)} "
            "do not fit together"
        )
    if cuda.takes(out_a, out_a.shape[2]) and out_b.dtype == out_a.dtype:
        return cuda_attention.merge_states(out_a, lse_a, out_b, lse_b)
    return merge_states_reference(out_a, lse_a, out_b, lse_b)


def merge_states_reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain torch twin of `merge_states`."""
    lse = torch.logaddexp(lse_a, lse_b)
    top = lse.clamp_min(torch.finfo(lse.dtype).min)  # where both are empty
    a, b = (lse_a - top).exp()[..., None], (lse_b - top).exp()[..., None]
    return (out_a.to(lse.dtype) * a + out_b.to(lse.dtype) * b).to(out_a.dtype), lse
