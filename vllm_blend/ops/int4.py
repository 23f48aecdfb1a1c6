"""Products with weight matrices that stay in 4 bits: here on a CPU, and in `int4_tiles` on a GPU.

On a CPU, the numbers are those of the same matrix dequantized at load, to the bit: (number - zero point) * scale in
float32, rounded to the dtype of the activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu
from vllm_blend.ops.bindings import DTYPE_CODES, kernels_for
from vllm_blend.ops.int4_matrix import Int4Matrix, Int4Tiles, Int4Weight
from vllm_blend.ops.int4_tiles import tiles_linear

RUN = 16  # inputs that follow one another in the halves of a run of bytes: INT4_RUN of csrc/cpu/int4.h
IN_MULTIPLE, OUT_MULTIPLE = 2 * RUN, 16  # of the sizes of a matrix that the kernel multiplies
SCALE_DTYPES = tuple(DTYPE_CODES)

# The most rows of activations for which a product that unpacks the weights as it goes beats torch's product with the
# unpacked matrix, by instruction set. Measured on Sapphire Rapids, one thread of a shared machine, the matrices of 8
# layers of a 0.6B model (bf16: 240 MB, in 4 bits 63), milliseconds of CPU time for kernel / unpacked / dense: bf16 16
# rows 26 / 84 / 25, 64 rows 44 / 96 / 37; of two layers 128 rows 17 / 37 / 15, 256 rows 35 / 44 / 35, 1024 rows 165 /
# 82 / 76. float32 (480 MB) 16 rows 70 / 171 / 63, 64 rows 159 / 269 / 203; of two layers 128 rows 67 / 100 / 79, 256
# rows 190 / 178 / 148; with AVX2 16 rows 81 / 150 / 69, 64 rows 355 / 233 / 196.
#
# In bf16, kernel / dense / torch's own product (aten::_weight_int4pack_mm_for_cpu): 1 row 17 / 19 / 10, 16 rows 22 / 20
# / 63, 64 rows 40 / 38 / 265. In float32 torch's takes 9 times as long as the dense one at 1 row, and 100 times at 64;
# it rounds scales to the activations' dtype, and its layout cannot be unpacked for many rows.
KERNEL_ROWS = {
    "amx": {torch.bfloat16: 256, torch.float32: 128, torch.float16: 128},
    "avx512bf16": {torch.bfloat16: 64, torch.float32: 128, torch.float16: 128},
    "avx512": {torch.bfloat16: 64, torch.float32: 128, torch.float16: 128},
}
OTHER_ROWS = 32
UNPACKED_AT_ONCE = 1 << 24  # entries, so that the unpacked part of a large matrix takes no more than 64 MB


def why_not_int4(features: int, size: int, group_size: int, scale_dtype: torch.dtype) -> str | None:
    """Return why no kernel multiplies a matrix [features, size] in 4 bits on a CPU, None if one does."""
    if size % IN_MULTIPLE or features % OUT_MULTIPLE:
        return (
            f"the layer has {size} inputs and {features} outputs, which must be multiples of {IN_MULTIPLE} and "
            f"{OUT_MULTIPLE}"
        )
    if group_size % RUN:
        return f"groups of {group_size} inputs are not multiples of {RUN}"
    if scale_dtype not in SCALE_DTYPES:
        return f"scales are {str(scale_dtype).removeprefix('torch.')}"
    return None


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers 0 to 15 [out, in] uint8 as the `values` of an `Int4Matrix`."""
    lower, upper = numbers.unflatten(1, (-1, 2, RUN)).unbind(2)
    return torch.bitwise_or(lower, upper << 4).flatten(1).contiguous()


def unpack_int4(weight: Int4Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [out, in] in `dtype`."""
    kernels = kernels_for(weight.values.new_empty(0, dtype=dtype))
    return unpack_int4_reference(weight, dtype) if kernels is None else cpu.int4_unpack(kernels, weight, dtype)


def unpack_int4_reference(weight: Int4Matrix, dtype: torch.dtype) -> torch.Tensor:
    runs = weight.values.unflatten(1, (-1, RUN))
    numbers = torch.stack([runs & 15, runs >> 4], 2).view(len(runs), -1, weight.group_size).float()
    scaled: torch.Tensor = (numbers - weight.zeros[..., None]) * weight.scales[..., None].float()
    return scaled.flatten(1).to(dtype)


def max_kernel_rows(isa: str, dtype: torch.dtype) -> int:
    """Return the most rows that the kernel multiplies; with more, the matrix is unpacked first."""
    return KERNEL_ROWS.get(isa, {}).get(dtype, OTHER_ROWS)


def int4_linear(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [rows, in] times the matrix [out, in] transposed, plus bias [out] -> [rows, out]."""
    if isinstance(weight, Int4Tiles):
        return tiles_linear(x, weight, bias)
    kernels = kernels_for(x)
    if (
        kernels is not None
        and x.shape[0] <= max_kernel_rows(kernels.isa, x.dtype)
        and cpu.accepts_int4(x, weight, bias)
    ):
        return cpu.int4_linear(kernels, x, weight, bias)
    features, size = weight.shape
    at_once = max(1, UNPACKED_AT_ONCE // size)
    if features <= at_once:
        return F.linear(x, unpack_int4(weight, x.dtype), bias)
    out = x.new_empty(x.shape[0], features)
    for first in range(0, features, at_once):
        rows = slice(first, first + at_once)
        out[:, rows] = F.linear(x, unpack_int4(weight.rows(rows), x.dtype), None if bias is None else bias[rows])
    return out
