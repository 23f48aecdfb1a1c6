"""What a format of quantized weights says: which tensors make up a matrix, and what numbers they stand for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from vllm_blend.models.stored import BadTensor, Sliceable, StoredTensor
from vllm_blend.models.weight_formats.int4 import NotInt4, StoredInt4
from vllm_blend.ops.fp8 import QuantizedRows

Parts = Mapping[str, torch.Tensor]
KV_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale")  # of an FP8 KV cache: here it has the model's dtype
FIELD = "quantization_config"  # of config.json


class WeightFormat(ABC):
    """How a checkpoint's matrices are quantized. One is made from the `quantization_config` of config.json, and raises
    ValueError naming the field for an option that it does not know."""

    name: ClassVar[str]  # `quant_method` in config.json
    stores: ClassVar[str]  # what the format's matrices are stored as, for people
    parts: ClassVar[tuple[str, ...]]  # last parts of the names of tensors that make up a matrix, beside "weight"
    required: ClassVar[tuple[str, ...]]
    ignored: ClassVar[tuple[str, ...]] = ()  # last parts of the names of tensors that dequantized matrices do not need
    only_experts: ClassVar[bool] = False  # whether it is of matrices that quantization="fp8" refuses
    has_weight: ClassVar[bool] = False  # whether "weight", or an expert's matrix under its own name, may be a part
    keeps_fp8: ClassVar[bool] = False  # whether `quantized_rows` may give something
    keeps_int4: ClassVar[bool] = False  # whether `int4` may give something

    @abstractmethod
    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Read the fields of `quantization_config`."""

    @abstractmethod
    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        """Return the shape of the matrix that `parts` make up."""

    @abstractmethod
    def dequantize(self, parts: Parts) -> torch.Tensor:
        """Return the matrix [out, in] that `parts` stand for, in float32."""

    def part_of(self, name: str) -> tuple[str, str] | None:
        """Return the name of the matrix to which a tensor belongs and which part of it that is; None for others."""
        stem, _, last = name.rpartition(".")
        return (f"{stem}.weight", last) if last in self.parts else None

    def source(self, parts: Mapping[str, StoredTensor], device: torch.device) -> Sliceable:
        """Return what parts of the matrix are copied from; it is dequantized on `device`."""
        return self.dequantize({name: tensor.read().to(device) for name, tensor in parts.items()})

    def quantized_rows(self, parts: Parts) -> QuantizedRows | None:
        """Return the matrix in e4m3 with a scale for each row, if that is what the format is."""
        return None

    def int4(self, parts: Parts) -> StoredInt4:
        """Return the matrix as 4-bit integers, if that is what it is. Raises `NotInt4` that says why it is not."""
        raise NotInt4(f"{self.name!r} has no 4-bit integers")

    def combine(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return a checkpoint's tensors with each quantized matrix as one. Raises ValueError for a matrix that lacks a
        part."""
        combined: dict[str, StoredTensor] = {}
        matrices: dict[str, dict[str, StoredTensor]] = {}
        for name, tensor in stored.items():
            part = self.part_of(name)
            if part is not None:
                matrices.setdefault(part[0], {})[part[1]] = tensor
            elif name.rpartition(".")[2] not in self.ignored:
                combined[name] = tensor
        for name, parts in matrices.items():
            if name in combined and not self.has_weight:
                raise ValueError(
                    f"the checkpoint has {name} both as it is and quantized by {self.name!r} "
                    f"({', '.join(sorted(parts))}): only one of them can be meant; fetch it again"
                )
            if name in combined:
                parts["weight"] = combined.pop(name)
            missing = [part for part in self.required if part not in parts]
            if missing:
                raise ValueError(
                    f"{name} is quantized by {self.name!r}, but the checkpoint lacks its {', '.join(missing)} (it has "
                    f"{', '.join(sorted(parts))}): fetch it again"
                )
            combined[name] = DequantizedTensor(name, parts, self)
        return combined


class DequantizedTensor:
    """A quantized matrix, which is read and dequantized when it is wanted."""

    def __init__(self, name: str, parts: Mapping[str, StoredTensor], weight_format: WeightFormat) -> None:
        self.name, self._parts, self._format = name, dict(parts), weight_format
        try:
            self.shape = weight_format.shape(self._parts)
        except (ValueError, IndexError) as error:
            raise self._unfit(error) from error

    def read(self) -> torch.Tensor:
        return self.source(torch.device("cpu"))[()]

    def source(self, device: torch.device) -> Sliceable:
        try:
            source = self._format.source(self._parts, device)
            if isinstance(source, torch.Tensor):
                self._check_shape(source)
            return source
        except torch.OutOfMemoryError:  # of a GPU: nothing is wrong with the matrix
            raise
        except (ValueError, RuntimeError, IndexError) as error:  # torch's words for shapes that do not fit together
            raise self._unfit(error) from error

    def int4(self, device: torch.device) -> StoredInt4:
        """Return the matrix as 4-bit integers on `device`. Raises `NotInt4` if it is something else."""
        try:
            matrix = self._format.int4({name: tensor.read().to(device) for name, tensor in self._parts.items()})
            self._check_shape(matrix.numbers)
            return matrix
        except torch.OutOfMemoryError:  # of a GPU: nothing is wrong with the matrix
            raise
        except (ValueError, RuntimeError, IndexError) as error:
            raise self._unfit(error) from error

    def quantized_rows(self, device: torch.device) -> QuantizedRows | None:
        if not self._format.keeps_fp8:
            return None
        try:
            return self._format.quantized_rows({name: tensor.read().to(device) for name, tensor in self._parts.items()})
        except torch.OutOfMemoryError:  # of a GPU: nothing is wrong with the matrix
            raise
        except (ValueError, RuntimeError, IndexError) as error:
            raise self._unfit(error) from error

    def _check_shape(self, matrix: torch.Tensor) -> None:
        if tuple(matrix.shape) != tuple(self.shape):
            raise ValueError(f"they make up {tuple(matrix.shape)} instead of {tuple(self.shape)}")

    def _unfit(self, error: Exception) -> BadTensor:
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in self._parts.items())
        return BadTensor(
            f"{self.name} cannot be dequantized from {shapes} as {self._format.name!r} in config.json's {FIELD} asks: "
            f"{error}"
        )


def choice(fields: Mapping[str, Any], name: str, default: Any, known: tuple[Any, ...], why: str) -> Any:
    """Return a field of `quantization_config`. Raises ValueError if its value is not among the `known` ones."""
    value = fields.get(name, default)
    if isinstance(value, float) or value not in known:  # 4.0 == 4, but counts nothing
        listed = ", ".join(repr(one) for one in known if one is not None)
        raise ValueError(f"{FIELD}.{name} in config.json is {value!r}: {why} ({listed}); use an unquantized checkpoint")
    return value


def read_mapping(field: str, value: Any) -> Mapping[str, Any]:
    """Return the entries of a field, none if it is left out. Raises ValueError, naming it, if it is no object."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{field} in config.json is {value!r}: it must be an object")
    return value


def read_group_size(field: str, value: Any) -> int:
    """Return the number of inputs in a group, -1 for all. Raises ValueError, naming the field, for anything else."""
    if type(value) is not int or value == 0 or value < -1:
        raise ValueError(f"{field} in config.json is {value!r}: it must be positive, or -1")
    return value
