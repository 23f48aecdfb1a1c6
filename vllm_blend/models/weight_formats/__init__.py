"""The formats of quantized checkpoints, by the `quant_method` of config.json. They are dequantized at load."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.weight_formats.awq import AWQ
from vllm_blend.models.weight_formats.base import FIELD, WeightFormat, read_mapping
from vllm_blend.models.weight_formats.compressed_tensors import CompressedTensors
from vllm_blend.models.weight_formats.fp8 import FP8
from vllm_blend.models.weight_formats.gptq import GPTQ
from vllm_blend.models.weight_formats.mxfp4 import MXFP4
from vllm_blend.registry import Registry

_FORMATS: tuple[type[WeightFormat], ...] = (FP8, CompressedTensors, AWQ, GPTQ, MXFP4)
WEIGHT_FORMATS: Registry[type[WeightFormat]] = Registry("weight format", f"{FIELD}.quant_method", _FORMATS)


def weight_format(hf_config: Any) -> WeightFormat | None:
    """Return the format of a checkpoint, None for one that is not quantized. Raises ValueError, naming the field of
    config.json, for one that cannot be read."""
    fields = getattr(hf_config, FIELD, None)
    if not fields:
        return None
    fields = read_mapping(FIELD, fields.to_dict() if hasattr(fields, "to_dict") else fields)
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in WEIGHT_FORMATS:
        raise ValueError(
            f"{FIELD}.quant_method in config.json is {method!r}: the formats that can be read are "
            f"{', '.join(WEIGHT_FORMATS.names())}; use one of them, or an unquantized checkpoint"
        )
    return WEIGHT_FORMATS[method](fields)
