"""A weight matrix in 4 bits, as the kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix [out, in] in 4 bits: `values` [out, in / 2] uint8, `scales` [out, groups], `zeros` [out, groups] uint8.

    Of 16 bytes of `values`, the lower halves are 16 inputs of the row, and the upper halves the next 16. `in` is a
    multiple of 32, and the inputs of a group are a multiple of 16.
    """

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
