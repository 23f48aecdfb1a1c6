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
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    if scales.ndim == 1:
        scales = scales[:, None]
    if block is None and scales.shape[0] == rows and columns % scales.shape[1] == 0:
        return scales.repeat_interleave(columns // scales.shape[1], 1) if scales.shape[1] > 1 else scales
    if block is not None and tuple(scales.shape) == (-(-rows // block[0]), -(-columns // block[1])):
        return scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    asked = "per matrix, row or group of columns" if block is None else f"per block of {block[0]} x {block[1]}"
    raise ValueError(f"scales of shape {tuple(scales.shape)} are not {asked} of a matrix of {rows} x {columns}")


def e4m3_rows(weight: torch.Tensor, scales: torch.Tensor) -> QuantizedRows | None:
    """Return an e4m3 matrix and its scales as a scale for each row, None if they are finer than that."""
    if weight.dtype != torch.float8_e4m3fn or scales.numel() not in (1, len(weight)):
        return None
    return QuantizedRows(weight, scales.float().flatten().expand(len(weight)).contiguous())


def check_e4m3(weight: torch.Tensor) -> None:
    """Raise ValueError unless a matrix is stored in e4m3."""
    if weight.dtype != torch.float8_e4m3fn:
        raise ValueError(f"the weight is stored as {weight.dtype}, not torch.float8_e4m3fn")
