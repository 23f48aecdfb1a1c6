"""GPTQ checkpoints (Frantar et al., arXiv:2210.17323), as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_blend.models.stored import StoredTensor
from vllm_blend.models.weight_formats.base import FIELD, Parts, WeightFormat, choice, read_group_size, read_mapping
from vllm_blend.models.weight_formats.int4 import BITS, NotInt4, StoredInt4, check_in_order
from vllm_blend.models.weight_formats.packing import PACKED_BITS, WORD, unpack
from vllm_blend.models.weight_formats.scales import check_finite, check_groups

VERSIONS = ("gptq", "gptq_v2")  # the first one stores zero points less one


class GPTQ(WeightFormat):
    """Integers of 2, 4 or 8 bits, packed along a matrix's inputs; a scale and a zero point for each group of inputs.
    With `desc_act`, `g_idx` says to which group each input belongs."""

    name = "gptq"
    stores = "integers of 2, 4 or 8 bits packed; a scale and a zero point for each group of inputs, also `desc_act`"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    required = ("qweight", "scales")
    keeps_int4 = True

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.bits: int = choice(fields, "bits", None, PACKED_BITS, "only these can be unpacked")
        version = fields.get("checkpoint_format") or fields.get("format") or VERSIONS[0]
        choice({"checkpoint_format": version}, "checkpoint_format", None, VERSIONS, "only these layouts can be read")
        self.stored_less = 1 if version == VERSIONS[0] else 0
        choice(fields, "pack_dtype", "int32", ("int32", None), "only these words can be unpacked")
        self.group_size = read_group_size(f"{FIELD}.group_size", fields.get("group_size", -1))
        self.is_symmetric = bool(fields.get("sym", True))
        rules = read_mapping(f"{FIELD}.dynamic", fields.get("dynamic"))
        other = [one for one, rule in rules.items() if "bits" in read_mapping(f"{FIELD}.dynamic.{one}", rule)]
        if other:
            raise ValueError(
                f"{FIELD}.dynamic in config.json gives layers bits of their own ({other[0]!r}), which is not "
                "supported: use an unquantized checkpoint"
            )

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        words, columns = parts["qweight"].shape
        return columns, words * (WORD // self.bits)

    def dequantize(self, parts: Parts) -> torch.Tensor:
        values, zeros, scales, groups = self._read(parts)
        return ((values.float() - zeros.float()[groups]) * scales.float()[groups]).T

    def int4(self, parts: Parts) -> StoredInt4:
        if self.bits != BITS:
            raise NotInt4(f"its integers have {self.bits} bits")
        values, zeros, scales, groups = self._read(parts)
        check_in_order(groups, len(scales))
        return StoredInt4(values.T, zeros.T.to(torch.uint8), scales.T)

    def _read(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the integers [in, out], the zero points and scales [groups, out], and the group of each input."""
        values, scales = unpack(parts["qweight"], self.bits, 0), check_finite("scales", parts["scales"])
        inputs, outputs = values.shape
        if scales.ndim != 2 or scales.shape[1] != outputs:
            raise ValueError(f"scales are {tuple(scales.shape)}, not one for each group and each of {outputs} outputs")
        groups = parts.get("g_idx")
        if groups is None:
            size = inputs if self.group_size == -1 else self.group_size
            if len(scales) != -(-inputs // size):
                raise ValueError(f"{inputs} inputs in groups of {size} (group_size) do not have {len(scales)} scales")
            groups = torch.arange(inputs, device=values.device) // size
        groups = check_groups("g_idx", groups, inputs, len(scales))
        if "qzeros" in parts:
            by_group = unpack(parts["qzeros"], self.bits, 1)
            if by_group.shape != scales.shape:
                raise ValueError(f"qzeros hold {tuple(by_group.shape)} zero points for scales {tuple(scales.shape)}")
            zeros = by_group.short() + self.stored_less
        elif self.is_symmetric:
            zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.short, device=values.device)
        else:
            raise ValueError("the checkpoint lacks its qzeros")
        return values, zeros, scales, groups
