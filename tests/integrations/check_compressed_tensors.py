"""Weights that the compressed-tensors library compresses are read as it decompresses them itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from vllm_blend.models.weight_formats.compressed_tensors import CompressedTensors

GROUP = 32
SCHEMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pack-quantized": (
        PackedQuantizationCompressor,
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
    ),
    "pack-quantized, zero points": (
        PackedQuantizationCompressor,
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False},
    ),
    "pack-quantized, 8 bits": (
        PackedQuantizationCompressor,
        {"num_bits": 8, "type": "int", "strategy": "channel"},
    ),
    "int-quantized": (IntQuantizationCompressor, {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "float-quantized": (FloatQuantizationCompressor, {"num_bits": 8, "type": "float", "strategy": "channel"}),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_what_the_library_compresses(name: str) -> None:
    compressor, arguments = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=random)
    columns = 96 // GROUP if arguments["strategy"] == "group" else 1
    largest = 448.0 if arguments["type"] == "float" else 2 ** (arguments["num_bits"] - 1) - 1
    scale = weight.view(48, columns, -1).abs().amax(-1) / largest
    state = {"weight": weight, "weight_scale": scale}
    if not arguments.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-3, 4, (48, columns), generator=random).to(torch.int8)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": name.split(",")[0],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
    }
    matrix = CompressedTensors(config).dequantize(stored)
    torch.testing.assert_close(matrix, expected.float(), rtol=1e-6, atol=1e-7)
    assert matrix.std() > 0.5
