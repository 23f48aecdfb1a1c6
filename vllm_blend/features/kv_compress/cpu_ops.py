"""The compiled CPU kernels that sum attention for KV-Compress, on torch tensors, as in `vllm_blend.ops.cpu`."""

from __future__ import annotations

import torch

from vllm_blend.features.kv_compress.sums import KeyRows, SumRule, WindowKeys
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import CACHE_CODES, DTYPE_CODES, CPUKernels, raise_status
from vllm_blend.ops.cpu import token_rows
from vllm_blend.ops.paged_kv import PagedKV


def window_sums(kernels: CPUKernels, q: torch.Tensor, kv: PagedKV, keys: WindowKeys, rule: SumRule) -> torch.Tensor:
    """Run `ops.window_sums` on the CPU kernels."""
    block_table, n, query_positions = keys
    q, q_stride = token_rows(q)
    queries, heads, head_dim = q.shape
    sums = torch.empty(heads, n, dtype=torch.float32)
    status = kernels.window_sums(
        to.Sums(sums), to.Query(q), kv.key_address, to.Positions(query_positions), to.BlockTables(block_table),
        queries, n, len(block_table), kv.num_blocks, kv.block_size, heads, kv.kv_heads, head_dim, q_stride,
        rule.buffer, rule.scale, rule.power, DTYPE_CODES[q.dtype], CACHE_CODES[kv.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "window_sums")
    return sums


def accumulate_sums(
    kernels: CPUKernels, metric: torch.Tensor, q: torch.Tensor, kv: PagedKV, key_rows: KeyRows, rule: SumRule
) -> None:
    """Run `ops.accumulate_sums` on the CPU kernels."""
    q, q_stride = token_rows(q)
    rows, group, head_dim = q.shape
    pages, block_size = metric.shape
    status = kernels.accumulate_sums(
        to.Metric(metric), to.Query(q), kv.key_address, to.BlockTables(key_rows.tables), to.SeqLens(key_rows.lengths),
        to.KeyPositions(key_rows.key_positions), to.Positions(key_rows.query_positions), rows, key_rows.tables.shape[1],
        key_rows.tables.stride(0), pages, block_size, group, head_dim, q_stride, rule.buffer, rule.scale, rule.power,
        DTYPE_CODES[q.dtype], CACHE_CODES[kv.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "accumulate_sums")
