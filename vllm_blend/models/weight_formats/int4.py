"""Matrices of 4-bit integers as a checkpoint has them, whatever their order in its words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = 4


class NotInt4(Exception):
    """A matrix cannot stay in 4 bits; the message says why."""


@dataclass(frozen=True)
class StoredInt4:
    """A matrix [out, in], (numbers - zeros) * scales: `numbers` [out, in] uint8 from 0 to 15, `zeros` [out, groups]
    uint8, `scales` [out, groups] as they are stored. The groups are runs of inputs of one size. Raises ValueError for
    shapes that do not fit together: kernels read what these say is there."""

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        rows, inputs = self.numbers.shape
        given, zeros = tuple(self.scales.shape), tuple(self.zeros.shape)
        if len(given) != 2 or zeros != given or given[0] != rows or given[1] == 0 or inputs % given[1]:
            raise ValueError(
                f"scales {given} and zero points {zeros} are not those of groups of a matrix of {rows} x {inputs}"
            )

    @property
    def group_size(self) -> int:
        return self.numbers.shape[1] // self.scales.shape[1]


def check_in_order(groups: torch.Tensor, count: int) -> None:
    """Raise `NotInt4` unless the inputs [in], whose groups these are, lie in order, each of `count` groups alike."""
    inputs = len(groups)
    if inputs % count or not torch.equal(
        groups.long(), torch.arange(inputs, device=groups.device) // (inputs // count)
    ):
        raise NotInt4("the inputs of a group do not lie together (desc_act)")
