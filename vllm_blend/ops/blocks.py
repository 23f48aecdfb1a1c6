"""Matrices that stay in ggml's blocks on a CPU, as GGUF files have them: products with them, and rows of them.

Few rows are multiplied by a kernel that unpacks the numbers as it goes; for many, a stretch of the matrix at a time is
unpacked to the activations' dtype, and torch multiplies. The numbers are those of the file in both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_blend.ops import cpu
from vllm_blend.ops.bindings import CPUKernels, cpu_kernels, kernels_for

BAND = 16  # rows whose numbers lie side by side: BAND of csrc/cpu/blocks.h
# Of each type that has a kernel, by ggml's number: its name, the inputs of a block, and its bytes for each row.
BLOCK_TYPES = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 148),  # 144 in a file, which has scales of 6 bits
    13: ("Q5_K", 256, 180),  # 176
    14: ("Q6_K", 256, 210),
}
# The most rows for which the kernel beats unpacking and torch's product. Measured on a Zen 5 with AVX512-BF16, one
# thread of a busy machine, matrices of 4864 x 1024 in Q5_0 (3.4 MB, in bfloat16 10), microseconds of CPU time for
# kernel / unpacked / dense bfloat16: 1 row 161 / 1190 / 708, 4 rows 347 / 1278 / 758, 8 rows 683 / 1483 / 845, 16 rows
# 1135 / 1530 / 1066, 32 rows 1877 / 2183 / 1352, 64 rows 3442 / 2893 / 1972; 512 rows - / 13846 / 11959. Other types
# differ by less than a third. One row reads its matrix at 21 GB/s, which two threads share: there is no time to win by
# rounding activations to 8 bits, and their products would be off by half a percent of the activations' size.
KERNEL_ROWS = 32
UNPACKED_AT_ONCE = 1 << 22  # entries, so that what is unpacked is still in the cache when it is multiplied


@dataclass(frozen=True)
class BlockRows:
    """Rows of one type: `data` [bands, bytes] uint8 as csrc/cpu/blocks.h says, for a matrix [features, size]."""

    kind: int
    features: int
    size: int
    data: torch.Tensor


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix [out, in] in blocks: parts that follow one another, each of one type."""

    rounding: ClassVar[str] = ""  # the numbers are those of the file
    parts: tuple[BlockRows, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.features for part in self.parts), self.parts[0].size

    @property
    def nbytes(self) -> int:
        """Return the bytes that the matrix takes."""
        return sum(part.data.nbytes for part in self.parts)


def why_not_blocks(kind: int, size: int) -> str | None:
    """Return why no kernel multiplies rows of `size` inputs of this type of ggml, None if one does."""
    if kind not in BLOCK_TYPES:
        names = ", ".join(name for name, _, _ in BLOCK_TYPES.values())
        return f"of the quantized types {names} are multiplied as they are"
    inputs = BLOCK_TYPES[kind][1]
    return f"rows of {size} inputs are not made of blocks of {inputs}" if size % inputs else None


def pack_blocks(
    kind: int, stored: Sequence[torch.Tensor], orders: Sequence[torch.Tensor | None], size: int
) -> BlockRows:
    """Return the rows of matrices of one type as a file has them (uint8 [rows, bytes]), one matrix after another, each
    in the order of rows that is given. Needs the compiled kernels."""
    features = sum(map(len, stored))
    inputs, row_bytes = BLOCK_TYPES[kind][1:]
    data = torch.empty(-(-features // BAND), BAND * size // inputs * row_bytes, dtype=torch.uint8)
    kernels, band = cpu_kernels(), 0
    if any(len(matrix) % BAND for matrix in stored[:-1]):
        stored, orders = [torch.cat([m if o is None else m[o] for m, o in zip(stored, orders, strict=True)])], [None]
    for matrix, order in zip(stored, orders, strict=True):
        rows = torch.arange(len(matrix)) if order is None else order
        bands = -(-len(matrix) // BAND)
        cpu.blocks_pack(kernels, data[band : band + bands], matrix, rows, size, kind)
        band += bands
    return BlockRows(kind, features, size, data)


def unpack_blocks(part: BlockRows, dtype: torch.dtype, first: int = 0, count: int | None = None) -> torch.Tensor:
    """Return `count` rows from `first` on, a multiple of 16, in `dtype`; by default all."""
    count = part.features - first if count is None else count
    return cpu.blocks_unpack(
        _kernels(part.data.new_empty(0, dtype=dtype)), part.data, first, count, part.size, part.kind, dtype
    )


def blocks_linear(x: torch.Tensor, weight: BlockMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [rows, in] times the matrix [out, in] transposed, plus bias [out] -> [rows, out]."""
    kernels = _kernels(x)
    out = x.new_empty(len(x), weight.shape[0])
    is_few = len(x) <= KERNEL_ROWS
    if is_few and x.stride(1) != 1:
        x = x.contiguous()
    start = 0
    for part in weight.parts:
        columns = out[:, start : start + part.features]
        own_bias = None if bias is None else bias[start : start + part.features]
        start += part.features
        if is_few:
            cpu.blocks_linear(kernels, columns, x, part.data, own_bias, part.kind)
            continue
        at_once = max(1, UNPACKED_AT_ONCE // part.size // BAND) * BAND
        for first in range(0, part.features, at_once):
            count = min(at_once, part.features - first)
            rows = cpu.blocks_unpack(kernels, part.data, first, count, part.size, part.kind, x.dtype)
            slice_bias = None if own_bias is None else own_bias[first : first + count]
            columns[:, first : first + count] = F.linear(x, rows, slice_bias)
    return out


def grouped_blocks_linear(x: torch.Tensor, weights: Sequence[BlockMatrix], stops: torch.Tensor) -> torch.Tensor:
    """Return the products of x [rows, in], in groups of rows that follow one another, with a matrix for each group ->
    [rows, out]. `stops` [groups] are the rows at which groups end."""
    out = x.new_empty(len(x), weights[0].shape[0])
    start = 0
    for weight, stop in zip(weights, stops.tolist(), strict=True):
        if stop > start:
            out[start:stop] = blocks_linear(x[start:stop], weight)
        start = stop
    return out


def blocks_rows(ids: torch.Tensor, weight: BlockMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `ids` [T] int64 of a matrix of one part, in `dtype`. Raises IndexError for one that it lacks."""
    [part] = weight.parts
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < part.features:
        raise IndexError(f"row {int(ids.max())} or {int(ids.min())} is outside of a matrix of {part.features} rows")
    out = torch.empty(len(ids), part.size, dtype=dtype)
    cpu.blocks_rows(_kernels(out), out, part.data, ids.contiguous(), part.kind)
    return out


def _kernels(like: torch.Tensor) -> CPUKernels:
    kernels = kernels_for(like)
    if kernels is None:
        raise TypeError(
            f"matrices in blocks are multiplied on a CPU by the compiled kernels alone, not in {like.dtype}"
        )
    return kernels
