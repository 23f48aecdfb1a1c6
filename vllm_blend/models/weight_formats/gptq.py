"""GPTQ checkpoints (Frantar et al., arXiv:2210.17323), as AutoGPTQ and GPTQModel write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_blend.models.stored import StoredTensor
from vllm_blend.models.weight_formats.base import FIELD, Parts, WeightFormat, choice
from vllm_blend.models.weight_formats.packing import PACKED_BITS, WORD, unpack

VERSIONS = ("gptq", "gptq_v2")  # the first one stores zero points less one


class GPTQ(WeightFormat):
    """Integers of 2, 4 or 8 bits, packed along a matrix's inputs; a scale and a zero point for each group of inputs.
    With `desc_act`, `g_idx` says to which group each input belongs."""

    name = "gptq"
    stores = "integers of 2, 4 or 8 bits packed; a scale and a zero point for each group of inputs, also `desc_act`"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    required = ("qweight", "scales")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.bits: int = choice(fields, "bits", None, PACKED_BITS, "only these can be unpacked")
        version = fields.get("checkpoint_format") or fields.get("format") or VERSIONS[0]
        choice({"checkpoint_format": version}, "checkpoint_format", None, VERSIONS, "only these layouts can be read")
        self.stored_less = 1 if version == VERSIONS[0] else 0
        choice(fields, "pack_dtype", "int32", ("int32", None), "only these words can be unpacked")
        group_size = fields.get("group_size", -1)
        if not isinstance(group_size, int) or group_size == 0 or group_size < -1:
            raise ValueError(f"{FIELD}.group_size in config.json is {group_size!r}: it must be positive, or -1")
        self.group_size = group_size
        self.is_symmetric = bool(fields.get("sym", True))
        other = [pattern for pattern, rule in (fields.get("dynamic") or {}).items() if rule and "bits" in rule]
        if other:
            raise ValueError(
                f"{FIELD}.dynamic in config.json gives layers bits of their own ({other[0]!r}), which is not "
                "supported: use an unquantized checkpoint"
            )

    def shape(self, parts: Mapping[str, StoredTensor]) -> tuple[int, ...]:
        words, columns = parts["qweight"].shape
        return columns, words * (WORD // self.bits)

    def dequantize(self, parts: Parts) -> torch.Tensor:
        values, scales = unpack(parts["qweight"], self.bits, 0), parts["scales"].float()
        inputs = len(values)
        groups = parts.get("g_idx")
        if groups is None:
            size = inputs if self.group_size == -1 else self.group_size
            groups = torch.arange(inputs, device=values.device) // size
        groups = groups.long()
        if len(groups) != inputs or int(groups.min()) < 0 or int(groups.max()) >= len(scales):
            raise ValueError(f"{inputs} inputs belong to groups up to {int(groups.max())}, of {len(scales)}")
        if "qzeros" in parts:
            zeros = unpack(parts["qzeros"], self.bits, 1).float()[groups] + self.stored_less
        elif self.is_symmetric:
            zeros = torch.full((1, 1), 2.0 ** (self.bits - 1), device=values.device)
        else:
            raise ValueError("the checkpoint lacks its qzeros")
        return ((values.float() - zeros) * scales[groups]).T
