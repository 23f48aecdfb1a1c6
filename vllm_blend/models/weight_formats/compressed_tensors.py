"""Checkpoints of the compressed-tensors library (https://github.com/vllm-project/compressed-tensors), as LLM Compressor
writes them: FP8, INT8, and 4- or 8-bit integers packed into words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_blend.models.stored import StoredTensor
from vllm_blend.models.weight_formats.base import FIELD, KV_SCALES, Parts, WeightFormat, read_group_size, read_mapping
from vllm_blend.models.weight_formats.fp8 import read_block
from vllm_blend.models.weight_formats.int4 import BITS, NotInt4, StoredInt4, check_in_order
from vllm_blend.models.weight_formats.packing import WORD, unpack
from vllm_blend.models.weight_formats.scales import check_finite, check_groups, e4m3_rows, spread
from vllm_blend.ops.fp8 import QuantizedRows

FORMATS = ("dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "mixed-precision")
PACKED_BITS = (4, 8)  # the library has packed other numbers of bits in different ways over time


class CompressedTensors(WeightFormat):
    """Matrices in e4m3, int8 or packed integers; a scale for each matrix, row, group of columns or block."""

    name = "compressed-tensors"
    stores = "e4m3, int8, or integers of 4 or 8 bits packed; a scale for each block, group, row or matrix"
    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    required = ("weight_scale",)
    ignored = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", *KV_SCALES)
    has_weight = True
    keeps_fp8 = True
    keeps_int4 = True

    def __init__(self, fields: Mapping[str, Any]) -> None:
        groups = read_mapping(f"{FIELD}.config_groups", fields.get("config_groups"))
        places = {f"{FIELD}.config_groups.{name}": group for name, group in groups.items()}
        schemes = [(where, read_mapping(where, group)) for where, group in places.items()]
        formats = [(f"{FIELD}.format", fields.get("format") or "dense")]
        formats += [(f"{where}.format", scheme["format"]) for where, scheme in schemes if scheme.get("format")]
        for where, found in formats:
            if found not in FORMATS:
                raise ValueError(
                    f"{where} in config.json is {found!r}: only {', '.join(FORMATS)} can be read; use an unquantized "
                    "checkpoint"
                )
        for name in ("transform_config", "sparsity_config"):
            settings = read_mapping(f"{FIELD}.{name}", fields.get(name))
            if settings.get("config_groups") or settings.get("format", "dense") != "dense":
                raise ValueError(f"{FIELD}.{name} in config.json is not supported: use an unquantized checkpoint")
        weights = [read_mapping(f"{where}.weights", scheme.get("weights")) for where, scheme in schemes]
        self.bits: int | None = _common("num_bits", [one.get("num_bits") for one in weights if _is_integer(one)])
        sizes = [one.get("group_size") for one in weights]
        self.group_sizes = {read_group_size(f"{FIELD}.config_groups.*.weights.group_size", n) for n in sizes if n}
        self.all_in_groups = all(sizes) and -1 not in sizes
        self.block = read_block(
            f"{FIELD}.config_groups.*.weights.block_structure",
            _common("block_structure", [one.get("block_structure") for one in weights if _is_by_block(one)]),
        )

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        if "weight_packed" not in parts:
            return _present(parts, "weight").shape
        if "weight" in parts:
            raise ValueError("it has both weight and weight_packed, of which one is meant")
        shape = _present(parts, "weight_shape")
        if tuple(shape.shape) != (2,):  # told before it is read
            raise ValueError(f"weight_shape has the shape {tuple(shape.shape)}, but must be two integers")
        return tuple(int(size) for size in shape.read())

    def dequantize(self, parts: Parts) -> torch.Tensor:
        packed = parts.get("weight_packed")
        values = parts["weight"] if packed is None else self._unpacked(packed, 1, int(parts["weight_shape"][1]))
        if values.dtype not in (torch.float8_e4m3fn, torch.int8):
            raise ValueError(f"the weight is stored as {values.dtype}, not torch.float8_e4m3fn or torch.int8")
        rows, columns = values.shape
        scales = check_finite("weight_scale", parts["weight_scale"])
        self._check_group_size(columns, scales)
        by_entry = self._by_entry(parts, (rows, columns))
        zeros = parts.get("weight_zero_point")
        numbers = values.float()
        if zeros is not None:
            if packed is not None and zeros.dtype == torch.int32:
                zeros = self._unpacked(zeros, 0, rows)
            numbers -= by_entry(self._checked_zeros(zeros))
        return numbers * by_entry(scales)

    def _check_group_size(self, columns: int, scales: torch.Tensor) -> None:
        """Raise ValueError unless config.json has groups as large as those of the scales, if it says how large."""
        count = scales.shape[1] if scales.ndim == 2 and self.block is None else 1
        if count > 1 or (self.all_in_groups and scales.ndim == 2):
            size = -(-columns // max(1, count))
            if self.group_sizes and size not in self.group_sizes:
                sizes = ", ".join(map(str, sorted(self.group_sizes)))
                raise ValueError(
                    f"{columns} inputs with {count} scales are groups of {size}, but "
                    f"config_groups.*.weights.group_size is {sizes}"
                )

    def _checked_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        """Return zero points. Raises ValueError for those that no weight could have."""
        if zeros.is_floating_point():
            return check_finite("weight_zero_point", zeros)
        most = 2 ** ((self.bits or 8) - 1)
        if zeros.numel() and not -most <= int(zeros.min()) <= int(zeros.max()) < most:
            raise ValueError(f"weight_zero_point has {int(zeros.min())} to {int(zeros.max())}, beyond {self.bits} bits")
        return zeros

    def _by_entry(self, parts: Parts, shape: tuple[int, int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that gives each entry of a matrix its scale, or zero point."""
        groups = parts.get("weight_g_idx")
        if groups is None or bool((groups < 0).all()):  # a layer that was never reordered has -1 everywhere
            return lambda scales: spread(scales, shape, self.block if scales.ndim == 2 else None)
        index = groups

        def by_group(scales: torch.Tensor) -> torch.Tensor:
            if scales.ndim != 2 or len(scales) != shape[0]:
                raise ValueError(f"{tuple(scales.shape)} are not numbers of the groups of each of {shape[0]} rows")
            return scales.float()[:, check_groups("weight_g_idx", index, shape[1], scales.shape[1])]

        return by_group

    def _unpacked(self, words: torch.Tensor, dim: int, count: int) -> torch.Tensor:
        """Return the signed integers of words, of which the last ones along `dim` may be padding."""
        if self.bits not in PACKED_BITS:
            raise ValueError(f"config_groups.*.weights.num_bits is {self.bits}, but only 4 and 8 bits can be unpacked")
        if words.ndim != 2 or words.shape[dim] != -(-count * self.bits // WORD):
            raise ValueError(f"{tuple(words.shape)} words do not hold {count} integers of {self.bits} bits (num_bits)")
        unsigned = unpack(words, self.bits, dim).narrow(dim, 0, count)
        return torch.sub(unsigned.short(), 2 ** (self.bits - 1)).to(torch.int8)

    def int4(self, parts: Parts) -> StoredInt4:
        packed = parts.get("weight_packed")
        if packed is None or self.bits != BITS:
            raise NotInt4(f"its numbers are {'e4m3 or int8' if packed is None else f'integers of {self.bits} bits'}")
        middle = 2 ** (BITS - 1)
        numbers = self._unpacked(packed, 1, int(parts["weight_shape"][1])).add(middle).to(torch.uint8)
        rows, columns = numbers.shape
        self._check_group_size(columns, parts["weight_scale"])
        scales = _by_row("weight_scale", check_finite("weight_scale", parts["weight_scale"]), rows, columns)
        groups = parts.get("weight_g_idx")
        if groups is not None and not bool((groups < 0).all()):
            check_in_order(check_groups("weight_g_idx", groups, columns, scales.shape[1]), scales.shape[1])
        zeros = parts.get("weight_zero_point")
        if zeros is None:
            zeros = torch.full(scales.shape, middle, dtype=torch.uint8, device=numbers.device)
            return StoredInt4(numbers, zeros, scales)
        if zeros.dtype == torch.int32:
            zeros = self._unpacked(zeros, 0, rows)
        if zeros.is_floating_point():
            raise NotInt4("its zero points are not integers")
        shifted = self._checked_zeros(zeros).short().add(middle).to(torch.uint8)
        return StoredInt4(numbers, _by_row("weight_zero_point", shifted, rows, columns).expand(scales.shape), scales)

    def quantized_rows(self, parts: Parts) -> QuantizedRows | None:
        if "weight" not in parts or self.block is not None or "weight_g_idx" in parts or "weight_zero_point" in parts:
            return None
        return e4m3_rows(parts["weight"], check_finite("weight_scale", parts["weight_scale"]))


def _by_row(name: str, values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales or zero points as those of the groups of each row, [rows, groups]."""
    if values.numel() == 1:
        return values.reshape(1, 1).expand(rows, 1)
    by_row = values[:, None] if values.ndim == 1 else values
    if by_row.ndim != 2 or len(by_row) != rows or by_row.shape[1] == 0 or columns % by_row.shape[1]:
        raise NotInt4(f"its {name} of shape {tuple(values.shape)} is not that of groups of inputs")
    return by_row


def _is_integer(weights: Mapping[str, Any]) -> bool:
    return bool(weights.get("type", "int") == "int")


def _is_by_block(weights: Mapping[str, Any]) -> bool:
    return bool(weights.get("strategy") == "block")


def _common(name: str, values: list[Any]) -> Any:
    """Return what all groups of layers say. Raises ValueError if they differ."""
    if any(value != values[0] for value in values):
        raise ValueError(
            f"{FIELD}.config_groups in config.json have different weights.{name} ({', '.join(map(str, values))}): only "
            "one for all layers is supported; use an unquantized checkpoint"
        )
    return values[0] if values else None


def _present(parts: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if name not in parts:
        raise ValueError(f"the checkpoint lacks its {name}")
    return parts[name]
