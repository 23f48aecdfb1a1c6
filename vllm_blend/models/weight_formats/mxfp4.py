"""MXFP4 (Open Compute Project, Microscaling Formats v1.0) of gpt-oss' experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_blend.models.stored import Sliceable, StoredTensor
from vllm_blend.models.weight_formats.base import Parts, WeightFormat

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1; the fourth bit is the sign
EXPONENT_BIAS = 127  # of the scales, e8m0
NO_NUMBER = 255  # of the scales
GROUP_BYTES = 16
SUFFIXES = ("_blocks", "_scales")


class MXFP4(WeightFormat):
    """The matrices of a layer's experts, transposed, in e2m1 with a power of two for every 32 inputs.

    Tensors are `X_blocks` [experts, outputs, groups, bytes], the lower half of a byte first, and `X_scales` [experts,
    outputs, groups]. The matrices `X` are [experts, inputs, outputs], as unquantized checkpoints of gpt-oss have them.
    """

    name = "mxfp4"
    stores = "e2m1 with a power of two for every 32 inputs, of experts"
    parts = SUFFIXES
    required = SUFFIXES
    only_experts = True

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """There is nothing to read: the format has no options that change what is stored."""

    def part_of(self, name: str) -> tuple[str, str] | None:
        return next(((name.removesuffix(part), part) for part in SUFFIXES if name.endswith(part)), None)

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        experts, outputs, groups, size = parts["_blocks"].shape
        return experts, groups * size * 2, outputs

    def source(self, parts: Mapping[str, StoredTensor], device: torch.device) -> Sliceable:
        stored = {name: tensor.read() for name, tensor in parts.items()}
        _check(stored)
        if bool((stored["_scales"] == NO_NUMBER).any()):
            raise ValueError("_scales have numbers that are not finite")
        return _ByExpert(self, stored, device)

    def dequantize(self, parts: Parts) -> torch.Tensor:
        _check(parts)
        blocks, scales = parts["_blocks"], parts["_scales"]
        table = torch.tensor(MAGNITUDES + tuple(-value for value in MAGNITUDES), device=blocks.device)
        nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [..., groups, 32]
        values = torch.ldexp(table[nibbles.int()], scales.int()[..., None] - EXPONENT_BIAS)
        return values.flatten(-2).transpose(-2, -1)


def _check(parts: Parts) -> None:
    blocks, scales = parts["_blocks"], parts["_scales"]
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        raise ValueError(f"blocks are {blocks.dtype}, and scales {scales.dtype} {tuple(scales.shape)}")
    if blocks.shape[-1] != GROUP_BYTES:
        raise ValueError(f"groups have {blocks.shape[-1]} bytes, not {GROUP_BYTES}")


class _ByExpert:
    """The matrices of a layer, of which only the experts that an index names are dequantized."""

    def __init__(self, weight_format: MXFP4, parts: Parts, device: torch.device) -> None:
        self._format, self._parts, self._device = weight_format, parts, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *others = index or (slice(None),)
        own = {name: tensor[first].to(self._device) for name, tensor in self._parts.items()}
        part: torch.Tensor = self._format.dequantize(own)[slice(None), *others]
        return part
