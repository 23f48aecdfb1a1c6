"""AWQ checkpoints (Lin et al., arXiv:2306.00978), as AutoAWQ writes them for its GEMM kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_blend.models.stored import StoredTensor
from vllm_blend.models.weight_formats.base import FIELD, Parts, WeightFormat, choice, read_group_size
from vllm_blend.models.weight_formats.int4 import BITS, StoredInt4
from vllm_blend.models.weight_formats.packing import WORD, unpack
from vllm_blend.models.weight_formats.scales import check_finite

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # output i of a word is its nibble ORDER[i], the lowest one being 0


class AWQ(WeightFormat):
    """Integers of 4 bits, packed along a matrix's outputs in an order of their own; a scale and a zero point for each
    group of inputs."""

    name = "awq"
    stores = "integers of 4 bits packed; a scale and a zero point for each group of inputs"
    parts = ("qweight", "qzeros", "scales")
    required = ("qweight", "qzeros", "scales")
    keeps_int4 = True

    def __init__(self, fields: Mapping[str, Any]) -> None:
        bits = "bits" if "bits" in fields else "w_bit"
        choice(fields, bits, BITS, (BITS,), "only this can be unpacked")
        choice(fields, "version", "gemm", ("gemm", "GEMM"), "only this layout can be read")
        choice(fields, "zero_point", True, (True,), "only weights with zero points can be read")
        size = "group_size" if "group_size" in fields else "q_group_size"
        self.group_size = None if fields.get(size) is None else read_group_size(f"{FIELD}.{size}", fields[size])

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        inputs, words = parts["qweight"].shape
        return words * (WORD // BITS), inputs

    def dequantize(self, parts: Parts) -> torch.Tensor:
        values, zeros, scales = self._read(parts)
        by_group = values.float().unflatten(0, (len(scales), -1)) - zeros.float()[:, None]
        matrix: torch.Tensor = (by_group * scales.float()[:, None]).flatten(0, 1).T
        return matrix

    def int4(self, parts: Parts) -> StoredInt4:
        values, zeros, scales = self._read(parts)
        return StoredInt4(values.T, zeros.T, scales.T)

    def _read(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the integers [in, out], and the zero points and scales [groups, out]."""
        values, zeros, scales = _outputs(parts["qweight"]), _outputs(parts["qzeros"]), parts["scales"]
        check_finite("scales", scales)
        inputs, outputs = values.shape
        given, given_zeros = tuple(scales.shape), tuple(zeros.shape)
        if len(given) != 2 or given[1] != outputs or given_zeros[1] != outputs:
            raise ValueError(f"scales {given} and zero points {given_zeros} are not those of {outputs} outputs")
        if given[0] == 0 or inputs % given[0] or given_zeros != given:
            raise ValueError(f"{inputs} inputs do not divide into {given[0]} groups")
        size = inputs // given[0]
        if self.group_size is not None and size != (inputs if self.group_size == -1 else self.group_size):
            raise ValueError(f"the groups have {size} inputs, but group_size is {self.group_size}")
        return values, zeros, scales


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """Return the integers of words [inputs, words] in the order of the outputs."""
    nibbles: torch.Tensor = unpack(words, BITS, 1).unflatten(1, (-1, len(ORDER)))[..., list(ORDER)]
    return nibbles.flatten(1)
