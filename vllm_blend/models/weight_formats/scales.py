"""Scales of a matrix's entries, in any of the shapes in which checkpoints have them."""

from __future__ import annotations

import torch

from vllm_blend.ops.fp8 import QuantizedRows

Block = tuple[int, int]  # rows and columns that share a scale


def spread(scales: torch.Tensor, shape: tuple[int, int], block: Block | None = None) -> torch.Tensor:
    """Return `scales` in float32 such that they multiply a matrix of `shape`.

    There is one for the matrix, for each row, for each group of columns of a row, or, with `block`, for each block, of
    which the last ones may be cut off. Raises ValueError if they do not fit.
    """
    rows, columns = shape
    if scales.numel() == 1:
        return scales.float().reshape(1, 1)
    given = tuple(scales.shape)
    if scales.ndim == 1:
        scales = scales[:, None]
    if block is None and scales.ndim == 2 and scales.numel() and len(scales) == rows and columns % scales.shape[1] == 0:
        return scales.float().repeat_interleave(columns // scales.shape[1], 1)
    if block is not None and tuple(scales.shape) == (-(-rows // block[0]), -(-columns // block[1])):
        high, wide = min(block[0], rows), min(block[1], columns)  # a block may be said to be larger than any matrix
        return scales.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    asked = "per matrix, row or group of columns" if block is None else f"per block of {block[0]} x {block[1]}"
    raise ValueError(f"scales of shape {given} are not {asked} of a matrix of {rows} x {columns}")


def check_finite(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Return scales as they are. Raises ValueError, naming them, unless they are finite floating-point numbers."""
    if not numbers.is_floating_point():
        raise ValueError(f"{name} is stored as {numbers.dtype}, which is no floating-point type")
    if not bool(numbers.float().isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")
    return numbers


def check_groups(name: str, groups: torch.Tensor, inputs: int, count: int) -> torch.Tensor:
    """Return the group of each input as an index. Raises ValueError, naming it, unless all are among `count` groups."""
    if groups.is_floating_point() or groups.is_complex() or tuple(groups.shape) != (inputs,):
        raise ValueError(f"{name} is {groups.dtype} {tuple(groups.shape)}, but must be {inputs} integers")
    if inputs and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        lowest, highest = int(groups.min()), int(groups.max())
        raise ValueError(
            f"{name} has groups from {lowest}: {inputs} inputs belong to groups up to {highest}, of {count}"
        )
    return groups.long()


def e4m3_rows(weight: torch.Tensor, scales: torch.Tensor) -> QuantizedRows | None:
    """Return an e4m3 matrix and its scales as a scale for each row, None if they are finer than that."""
    is_by_row = scales.numel() == 1 or tuple(scales.shape) in ((len(weight),), (len(weight), 1))
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2 or not is_by_row:
        return None
    return QuantizedRows(weight, scales.float().flatten().expand(len(weight)).contiguous())


def check_e4m3(weight: torch.Tensor) -> None:
    """Raise ValueError unless a matrix is stored in e4m3."""
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"the weight is stored as {weight.dtype}, not torch.float8_e4m3fn")
