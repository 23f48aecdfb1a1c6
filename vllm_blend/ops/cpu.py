"""The compiled CPU kernels on torch tensors. What cannot go to a kernel never gets here: the ops decide that, by
`accepts_*`.

A call costs a few microseconds of Python, and a decode step of a small model makes a hundred of them: hence plain code,
no helper objects, and sizes read once.
"""

from __future__ import annotations

import torch

from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import DTYPE_CODES, CPUKernels, raise_status
from vllm_blend.ops.e4m3 import E4M3
from vllm_blend.ops.int4_matrix import Int4Matrix
from vllm_blend.ops.paged_kv import PagedKV

CONTIGUOUS = torch.contiguous_format  # outputs are allocated by empty_like: torch.empty(shape) costs 2 us more a call
MAX_HEAD_DIM = 256  # of the attention kernels, in steps of 16: MAX_HEAD_DIM of csrc/cpu/attention.h


def token_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return x [tokens, heads, head_dim] with every token's heads contiguous, and the distance between tokens."""
    _, heads, head_dim = x.shape
    stride = x.stride()
    if stride[2] == 1 and (stride[1] == head_dim or heads == 1):
        return x, stride[0]
    return x.contiguous(), heads * head_dim


def rotary(
    kernels: CPUKernels, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return q [tokens, heads, head_dim] and, unless None, k [tokens, kv_heads, head_dim], rotated."""
    q, q_stride = token_rows(q)
    tokens, heads, head_dim = q.shape
    q_out = torch.empty_like(q, memory_format=CONTIGUOUS)
    k_out = k_out_pointer = k_pointer = None
    kv_heads = k_stride = 0
    if k is not None:
        k, k_stride = token_rows(k)
        k_out = torch.empty_like(k, memory_format=CONTIGUOUS)
        kv_heads, k_pointer, k_out_pointer = k.shape[1], to.Key(k), to.KeyOut(k_out)
    status = kernels.rope(
        to.QueryOut(q_out), k_out_pointer, to.Query(q), k_pointer, None, to.Cos(cos), to.Sin(sin), None, None,
        None, tokens, heads, kv_heads, head_dim, cos.shape[1], q_stride, k_stride, 0, 0, DTYPE_CODES[q.dtype],
        DTYPE_CODES[q.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "rotary_embedding")
    return q_out, k_out


def accepts_cache(x: torch.Tensor, kv: PagedKV) -> bool:
    """Return whether kernels can work on this cache together with x."""
    return kv.dtype in (x.dtype, E4M3) and kv.is_alike and kv.is_contiguous


def accepts_attention(q: torch.Tensor, kv: PagedKV) -> bool:
    """Return whether the attention kernels can work on q [tokens, heads, head_dim] and this cache."""
    head_dim = q.shape[2]
    return head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM and accepts_cache(q, kv)


def accepts_linear(kernels: CPUKernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether the linear kernel can multiply x [rows, in] with this weight [out, in]."""
    features, size = weight.shape
    return (
        x.dtype in kernels.linear_dtypes
        and weight.dtype == x.dtype
        and size == x.shape[1]
        and size % 32 == 0
        and features % 16 == 0
        and weight.is_contiguous()
        and x.stride(1) == 1
        and not weight.requires_grad
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def linear(kernels: CPUKernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows, size = x.shape
    features = weight.shape[0]
    out = x.new_empty(rows, features)
    status = kernels.linear(
        to.Out(out), to.Input(x), to.Weight(weight), None if bias is None else to.Bias(bias), rows, size,
        features, x.stride(0), DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "linear")
    return out


def accepts_int4(x: torch.Tensor, weight: Int4Matrix, bias: torch.Tensor | None) -> bool:
    """Return whether the kernel can multiply x [rows, in] with this matrix [out, in], which is contiguous."""
    features, size = weight.shape
    return (
        x.dim() == 2
        and size == x.shape[1]
        and features % 16 == 0
        and x.stride(1) == 1
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


def int4_linear(kernels: CPUKernels, x: torch.Tensor, weight: Int4Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    rows, size = x.shape
    features = weight.shape[0]
    out = x.new_empty(rows, features)
    status = kernels.int4_linear(
        to.Out(out), to.Input(x), to.Weight(weight.values), to.Scales(weight.scales), to.ZeroPoints(weight.zeros),
        None if bias is None else to.Bias(bias), rows, size, features, weight.group_size, x.stride(0),
        DTYPE_CODES[weight.scales.dtype], DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "int4_linear")
    return out


def int4_unpack(kernels: CPUKernels, weight: Int4Matrix, dtype: torch.dtype) -> torch.Tensor:
    features, size = weight.shape
    out = torch.empty(features, size, dtype=dtype)
    status = kernels.int4_unpack(
        to.Out(out), to.Weight(weight.values), to.Scales(weight.scales), to.ZeroPoints(weight.zeros), size, features,
        weight.group_size, DTYPE_CODES[weight.scales.dtype], DTYPE_CODES[dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "int4_unpack")
    return out


def blocks_pack(
    kernels: CPUKernels, out: torch.Tensor, stored: torch.Tensor, rows: torch.Tensor, size: int, kind: int
) -> None:
    status = kernels.blocks_pack(
        to.Out(out), to.Weight(stored), to.Rows(rows), len(rows), size, kind, torch.get_num_threads()
    )
    if status:
        raise_status(status, "blocks_pack")


def blocks_linear(
    kernels: CPUKernels, out: torch.Tensor, x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, kind: int
) -> None:
    """Write x [rows, in] times a matrix, plus bias, into out [rows, features], whose rows may be parts of others."""
    rows, size = x.shape
    status = kernels.blocks_linear(
        to.Out(out), to.Input(x), to.Weight(data), None if bias is None else to.Bias(bias), rows, size, out.shape[1],
        out.stride(0), x.stride(0), kind, DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise_status(status, "blocks_linear")


def blocks_unpack(
    kernels: CPUKernels, data: torch.Tensor, first: int, rows: int, size: int, kind: int, dtype: torch.dtype
) -> torch.Tensor:
    out = torch.empty(rows, size, dtype=dtype)
    status = kernels.blocks_unpack(
        to.Out(out), to.Weight(data), first, rows, size, kind, DTYPE_CODES[dtype], torch.get_num_threads()
    )
    if status:
        raise_status(status, "blocks_unpack")
    return out


def blocks_rows(kernels: CPUKernels, out: torch.Tensor, data: torch.Tensor, ids: torch.Tensor, kind: int) -> None:
    count, size = out.shape
    status = kernels.blocks_rows(
        to.Out(out), to.Weight(data), to.Rows(ids), count, size, kind, DTYPE_CODES[out.dtype], torch.get_num_threads()
    )
    if status:
        raise_status(status, "blocks_rows")
