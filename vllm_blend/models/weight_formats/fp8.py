"""FP8 checkpoints of Hugging Face's own format, as DeepSeek-V3 (arXiv:2412.19437, section 3.3) and Qwen3 have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_blend.models.stored import StoredTensor
from vllm_blend.models.weight_formats.base import FIELD, KV_SCALES, Parts, WeightFormat, choice
from vllm_blend.models.weight_formats.scales import Block, check_e4m3, check_finite, e4m3_rows, spread
from vllm_blend.ops.fp8 import QuantizedRows

SCALES = ("weight_scale_inv", "weight_scale")  # both multiply the weight


class FP8(WeightFormat):
    """Matrices in e4m3 with a scale for each block (`weight_block_size`), each row, or each matrix."""

    name = "fp8"
    stores = "e4m3; a scale for each block, row or matrix"
    parts = SCALES
    required = ("weight",)
    ignored = ("input_scale", "activation_scale", "output_scale", *KV_SCALES)  # activations are not quantized
    has_weight = True
    keeps_fp8 = True

    def __init__(self, fields: Mapping[str, Any]) -> None:
        choice(fields, "fmt", "e4m3", ("e4m3", None), "only this FP8 type is supported")
        self.block = read_block(f"{FIELD}.weight_block_size", fields.get("weight_block_size"))

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        return parts["weight"].shape

    def dequantize(self, parts: Parts) -> torch.Tensor:
        weight, scales = parts["weight"], self._scales(parts)
        check_e4m3(weight)
        rows, columns = weight.shape
        return weight.float() * spread(scales, (rows, columns), self.block)

    def quantized_rows(self, parts: Parts) -> QuantizedRows | None:
        return e4m3_rows(parts["weight"], self._scales(parts)) if self.block is None else None

    @staticmethod
    def _scales(parts: Parts) -> torch.Tensor:
        name, *others = (name for name in SCALES if name in parts)
        if others:
            raise ValueError(f"it has both {name} and {others[0]}, of which one is meant")
        return check_finite(name, parts[name])


def read_block(field: str, value: Any) -> Block | None:
    """Return the size of a block of a field of config.json. Raises ValueError that names it."""
    if value is None:
        return None
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):
        raise ValueError(f"{field} in config.json is {value!r}: it must be two positive integers, rows and columns")
    return int(value[0]), int(value[1])
