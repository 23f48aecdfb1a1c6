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
    uint8, `scales` [out, groups] as they are stored. The groups are runs of inputs of one size."""

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor

    @property
    def group_size(self) -> int:
        return self.numbers.shape[1] // self.scales.shape[1]


def check_in_order(groups: torch.Tensor, count: int) -> None:
    """Raise `NotInt4` unless the inputs [in], whose groups these are, lie in order, each of `count` groups alike."""
    inputs = len(groups)
    if inputs % count or not torch.equal(groups.long(), torch.arange(inputs) // (inputs // count)):
        raise NotInt4("the inputs of a group do not lie together (desc_act)")
