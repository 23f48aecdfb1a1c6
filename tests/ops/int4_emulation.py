"""PyTorch's CUDA layout of 4-bit matrices, number by number, and its two operators for tensors on a CPU, where it has
none (`aten/src/ATen/native/cuda/int4mm.cu`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def entry(index: Sequence[int], place: int, words: int) -> tuple[int, int]:
    """Return the row and the input of the number at `place` (0: the lowest bits) of a word of the tiles.

    The operands of a matrix instruction are 8 rows and 16 inputs: lane t has row t // 4 and the inputs 2 (t % 4), the
    next one, and both 8 further on. A word has those of two such operands, the even inputs first.
    """
    tile_row, tile, lane, word = index
    first = 16 * (2 * words * tile + 2 * word)
    eight, is_odd = place % 4, place // 4
    return 8 * tile_row + lane // 4, first + 8 * eight + 2 * (lane % 4) + is_odd


def pack(pairs: torch.Tensor, inner_k_tiles: int) -> torch.Tensor:
    """Do what aten::_convert_weight_to_int4pack does: pairs [out, in / 2] uint8 have even inputs in the upper half."""
    rows, size = pairs.shape[0], 2 * pairs.shape[1]
    assert pairs.dtype == torch.uint8 and pairs.is_contiguous() and inner_k_tiles in (2, 4, 8)
    assert rows % 8 == 0 and size % (16 * inner_k_tiles) == 0
    numbers: Any = torch.stack([pairs >> 4, pairs & 15], 2).view(rows, size).numpy().astype(np.uint32)
    words = inner_k_tiles // 2
    out = np.zeros((rows // 8, size // (16 * inner_k_tiles), 32, words), np.uint32)
    for index in np.ndindex(out.shape):
        for place in range(8):
            out[index] |= numbers[entry(index, place, words)] << np.uint32(4 * place)
    return torch.from_numpy(out.view(np.int32))


def unpack(tiles: torch.Tensor) -> torch.Tensor:
    """Return the numbers [out, in] uint8 of tiles."""
    blocks, across, lanes, words = tiles.shape
    out = torch.zeros(8 * blocks, 32 * words * across, dtype=torch.uint8)
    values = tiles.numpy().view(np.uint32)
    for index in np.ndindex(blocks, across, lanes, words):
        for place in range(8):
            out[entry(index, place, words)] = int(values[index] >> np.uint32(4 * place)) & 15
    return out


def weights(tiles: torch.Tensor, group_size: int, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """Return the matrix [out, in] bfloat16 that aten::_weight_int4pack_mm multiplies by: the identity times it, by the
    operator that PyTorch has for CPUs, whose layout is another and whose scales and zeros are the same."""
    rows, size = 8 * len(tiles), tiles.shape[1] * 32 * tiles.shape[3]
    assert tiles.dtype == torch.int32 and group_size in (32, 64, 128, 256) and scales_and_zeros.dtype == torch.bfloat16
    assert scales_and_zeros.shape == (size // group_size, rows, 2) and scales_and_zeros.is_contiguous()
    more = -rows % 16  # rows of zeros, as this operator takes multiples of 16 alone
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(F.pad(unpack(tiles).int(), (0, 0, 0, more)), 2)
    identity, padded = torch.eye(size, dtype=torch.bfloat16), F.pad(scales_and_zeros, (0, 0, 0, more))
    out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(identity, packed, group_size, padded)
    return out[:, :rows].T.contiguous()


def multiply(x: torch.Tensor, tiles: torch.Tensor, group_size: int, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """Do what aten::_weight_int4pack_mm does: weights are rounded to bfloat16, and sums are float32."""
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) > 0
    return F.linear(x.float(), weights(tiles, group_size, scales_and_zeros).float()).bfloat16()


@contextmanager
def operators_on_cpu() -> Iterator[None]:
    """Let the two CUDA operators take tensors on a CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_convert_weight_to_int4pack", pack, "CPU")
        library.impl("_weight_int4pack_mm", multiply, "CPU")
        yield
