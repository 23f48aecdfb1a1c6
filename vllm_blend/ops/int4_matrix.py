"""Weight matrices in 4 bits, as the kernels of a CPU and those of a GPU take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix [out, in] in 4 bits on a CPU: `values` [out, in / 2] uint8, `scales` [out, groups], and `zeros`
    [out, groups] uint8.

    Of 16 bytes of `values`, the lower halves are 16 inputs of the row, and the upper halves the next 16. `in` is a
    multiple of 32, and the inputs of a group are a multiple of 16.
    """

    rounding: ClassVar[str] = ""  # the numbers are those of the checkpoint
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), 2 * self.values.shape[1]

    @property
    def group_size(self) -> int:
        return 2 * self.values.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Return the bytes that the matrix takes."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes

    def rows(self, rows: slice) -> Int4Matrix:
        """Return some rows of the matrix, in the same memory."""
        return Int4Matrix(self.values[rows], self.scales[rows], self.zeros[rows])


@dataclass(frozen=True)
class Int4Tiles:
    """A matrix [out, in] in 4 bits on a GPU, in PyTorch's layout: `tiles` [out / 8, in / (32 * words), 32, words] int32
    with 1, 2 or 4 words, see csrc/cuda/int4_tiles.cuh, and `scales_and_zeros` [groups, out, 2] bfloat16.

    A number q from 0 to 15 stands for (q - 8) * scale + zero, so that `zero` is (8 - zero point) * scale.
    """

    rounding: ClassVar[str] = "scales and zeros in bfloat16"
    tiles: torch.Tensor
    scales_and_zeros: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        blocks, across, lanes, words = self.tiles.shape
        return 8 * blocks, across * lanes * words

    @property
    def group_size(self) -> int:
        return self.shape[1] // len(self.scales_and_zeros)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the matrix takes."""
        return self.tiles.nbytes + self.scales_and_zeros.nbytes


Int4Weight: TypeAlias = Int4Matrix | Int4Tiles
