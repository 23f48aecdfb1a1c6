"""Products with weight matrices that stay in 4 bits on a GPU, by PyTorch's kernel (aten::_weight_int4pack_mm).

That kernel multiplies 16 rows of activations at a time and reads the weights again for every 16, so it wins where there
are few. For more rows the matrix is written out in bfloat16, for this product alone, and cuBLAS multiplies. Both have
the same weights, to the bit: scales and zero points are rounded to bfloat16, which is all that PyTorch's kernel takes.
"""

from __future__ import annotations

from math import gcd

import torch
import torch.nn.functional as F

from vllm_blend.ops import cuda
from vllm_blend.ops import pointers as to
from vllm_blend.ops.cuda_library import check, expect, stream_of
from vllm_blend.ops.int4_matrix import Int4Tiles

DTYPE = torch.bfloat16  # of activations, scales and zeros
CAPABILITY = (8, 0)  # the first with the kernel's bf16 instructions
MIDDLE = 8  # the number that stands for `zero`
OUT_MULTIPLE, IN_MULTIPLE = 8, 32  # of the sizes of a matrix
SMALLEST_GROUP, LARGEST_GROUP = 32, 256  # all powers of two from one to the other
MOST_WORDS = 4  # of a lane: it reads 16 bytes at once

# The most rows of activations that PyTorch's kernel multiplies; with more, the matrix is unpacked first. On an H100 the
# two ways meet between 16 rows (0.65 to 0.79 of the time) and 32 (1.26 to 1.38), by `python -m benchmarks.int4_gpu`.
KERNEL_ROWS = 16


def tiles_group(group_size: int) -> int:
    """Return the size of the groups in which tiles have groups of `group_size` inputs: the largest that divides it."""
    return gcd(group_size, LARGEST_GROUP)


def why_not_tiles(features: int, size: int, group_size: int) -> str | None:
    """Return why no kernel multiplies a matrix [features, size] in 4 bits on a GPU, None if one does."""
    if size % IN_MULTIPLE or features % OUT_MULTIPLE:
        return (
            f"the layer has {size} inputs and {features} outputs, which must be multiples of {IN_MULTIPLE} and "
            f"{OUT_MULTIPLE} on a GPU"
        )
    if tiles_group(group_size) < SMALLEST_GROUP:
        return f"groups of {group_size} inputs are not multiples of {SMALLEST_GROUP}, as a GPU needs them"
    return None


def pack_tiles(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Int4Tiles:
    """Return a matrix on the GPU where it lies, (numbers - zeros) * scales, in 4 bits: numbers 0 to 15 [out, in] uint8,
    scales [out, groups], zeros [out, groups] uint8."""
    size = numbers.shape[1]
    words = gcd(size // IN_MULTIPLE, MOST_WORDS)
    pairs = torch.bitwise_or(numbers[:, ::2] << 4, numbers[:, 1::2]).contiguous()  # even inputs in the upper halves
    tiles = torch._convert_weight_to_int4pack(pairs, 2 * words)
    return Int4Tiles(tiles, join_scales(scales, zeros, size))


def join_scales(scales: torch.Tensor, zeros: torch.Tensor, size: int) -> torch.Tensor:
    """Return scales and zero points [out, groups] of `size` inputs as the `scales_and_zeros` of `Int4Tiles`."""
    scale = scales.to(DTYPE)
    zero = ((MIDDLE - zeros.float()) * scale.float()).to(DTYPE)  # of the rounded scale: zero points remain almost 0
    group_size = size // scales.shape[1]
    by_group = torch.stack([scale, zero], 2).repeat_interleave(group_size // tiles_group(group_size), 1)
    return by_group.transpose(0, 1).contiguous()


def unpack_tiles(weight: Int4Tiles) -> torch.Tensor:
    """Return the matrix [out, in] in bfloat16."""
    if not cuda.accepts(weight.scales_and_zeros):
        return unpack_tiles_reference(weight)
    features, size = weight.shape
    out = torch.empty(features, size, dtype=DTYPE, device=weight.tiles.device)
    code = cuda.functions().int4_tiles_unpack(
        expect(to.Tiles, weight.tiles, "tiles", torch.int32),
        expect(to.Scales, weight.scales_and_zeros, "scales_and_zeros", DTYPE), to.Out(out), features, size,
        weight.group_size, weight.tiles.shape[3], stream_of(weight.tiles),
    )  # fmt: skip
    check("int4_tiles_unpack", code)
    return out


def unpack_tiles_reference(weight: Int4Tiles) -> torch.Tensor:
    features, _ = weight.shape
    words = weight.tiles.transpose(2, 3).reshape(features // 8, -1, 8, 4)  # [blocks of rows, runs of 32 inputs, row, c]
    shifts = torch.arange(0, 32, 4, device=words.device)
    nibbles = (words[..., None] >> shifts & 15).unflatten(-1, (2, 4))  # [.., c, which of two, which of the four eights]
    numbers = nibbles.permute(0, 2, 1, 5, 3, 4).reshape(features, -1, weight.group_size)
    scale, zero = weight.scales_and_zeros.transpose(0, 1).float().unbind(2)
    # Exact in float32, and so rounded once, as in the kernels: 12 bits for the product, and zero is of its size.
    scaled: torch.Tensor = (numbers - MIDDLE).float() * scale[..., None] + zero[..., None]
    return scaled.flatten(1).to(DTYPE)


def tiles_linear(x: torch.Tensor, weight: Int4Tiles, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [rows, in] bfloat16 times the matrix [out, in] transposed, plus bias [out] -> [rows, out]."""
    if 0 < x.shape[0] <= KERNEL_ROWS:
        out: torch.Tensor = torch._weight_int4pack_mm(
            x.contiguous(), weight.tiles, weight.group_size, weight.scales_and_zeros
        )
        return out if bias is None else out + bias
    return F.linear(x, unpack_tiles(weight), bias)
