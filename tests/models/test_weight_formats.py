"""Quantized checkpoints: what is loaded is what the formats' definitions say, and what cannot be read is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.distributed.ranks import CPU, on_ranks
from tests.models.quantized import QUANTIZED, save_quantized
from tests.models.tiny import CONTEXT, PagedRunner, edit_config, load_tiny, prompt
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.layers.quantization import QuantizedDestination
from vllm_blend.models.loader import construct_as, load_hf_config, load_model
from vllm_blend.models.registry import resolve_model_class
from vllm_blend.models.weight_formats import WEIGHT_FORMATS, weight_format
from vllm_blend.models.weight_formats.mxfp4 import MXFP4
from vllm_blend.models.weights import checkpoint_destinations, fill_from_files

pytestmark = pytest.mark.cpu_only
LENGTH = 40


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_loaded_is_what_is_meant(name: str, tmp_path: Path) -> None:
    meant = save_quantized(tmp_path, name)
    destinations = checkpoint_destinations(load_tiny(str(tmp_path)))
    assert destinations.keys() == meant.keys()
    for key, matrix in meant.items():
        loaded = destinations[key]
        assert isinstance(loaded, torch.Tensor)
        torch.testing.assert_close(loaded.double(), matrix, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["fp8 blocks", "pack-quantized, zero points", "awq", "gptq, reordered"])
def test_ranks_have_their_shares(name: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, name)

    def logits(ranks: Any) -> torch.Tensor:
        config = load_hf_config(str(tmp_path))
        model = load_model(config, str(tmp_path), torch.float32, CPU, max_position=CONTEXT, ranks=ranks)
        return PagedRunner(model).run(prompt(LENGTH), [LENGTH])

    [expected] = on_ranks(1, logits)
    shared, _ = on_ranks(2, logits)
    assert expected.std() > 0.5
    torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-4)


def test_experts_are_dequantized_one_by_one(tmp_path: Path) -> None:
    meant = save_quantized(tmp_path, "fp8 blocks", "qwen3_moe")
    destinations = checkpoint_destinations(load_tiny(str(tmp_path)))
    name = "model.layers.2.mlp.experts.3.down_proj.weight"
    loaded = destinations[name]
    assert isinstance(loaded, torch.Tensor)
    torch.testing.assert_close(loaded.double(), meant[name], rtol=2e-7, atol=1e-9)


def test_parts_of_a_matrix_may_be_in_different_files(tmp_path: Path) -> None:
    meant = save_quantized(tmp_path, "awq")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for suffix in ("qweight", "others"):
        part = {key: t for key, t in tensors.items() if key.endswith("qweight") == (suffix == "qweight")}
        save_file(part, tmp_path / f"{suffix}.safetensors", {"format": "pt"})
    path.unlink()
    name = "model.layers.0.mlp.up_proj.weight"
    loaded = checkpoint_destinations(load_tiny(str(tmp_path)))[name]
    assert isinstance(loaded, torch.Tensor)
    torch.testing.assert_close(loaded.double(), meant[name], rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["fp8 matrices", "float-quantized rows", "fp8 blocks", "int-quantized"])
def test_fp8_by_rows_stays_as_it_is(name: str, tmp_path: Path) -> None:
    """With quantization="fp8" weights whose scales are those of rows are taken over; others are quantized anew."""
    save_quantized(tmp_path, name)
    stored = load_file(tmp_path / "model.safetensors")
    config = load_hf_config(str(tmp_path))
    with construct_as(torch.bfloat16, CPU):
        model = resolve_model_class(config)(config, CONTEXT, "fp8")
    fill_from_files(model, [tmp_path / "model.safetensors"], weight_format(config))
    destination = checkpoint_destinations(model)["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(destination, QuantizedDestination)
    weight = stored["model.layers.1.mlp.down_proj.weight"]
    same = torch.equal(destination.rows.values.view(torch.uint8), weight.view(torch.uint8))
    assert same is (name in ("fp8 matrices", "float-quantized rows"))
    if same:
        scales = stored["model.layers.1.mlp.down_proj.weight_scale"].flatten()
        assert torch.equal(destination.rows.scales, scales.expand(len(weight)))


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 4, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), generator=random, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(MXFP4({}).dequantize({"_blocks": blocks, "_scales": scales}), expected)


def test_mxfp4_of_some_experts() -> None:
    random = torch.Generator().manual_seed(0)
    parts = {
        "_blocks": torch.randint(256, (3, 10, 4, 16), generator=random, dtype=torch.uint8),
        "_scales": torch.randint(110, 140, (3, 10, 4), generator=random, dtype=torch.uint8),
    }

    class Stored:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.shape = tensor, tuple(tensor.shape)

        def read(self) -> torch.Tensor:
            return self.tensor

    stored: Any = {name: Stored(tensor) for name, tensor in parts.items()}
    whole = MXFP4({}).dequantize(parts)
    assert MXFP4({}).shape(stored) == tuple(whole.shape)
    source = MXFP4({}).source(stored, CPU)
    assert torch.equal(source[()], whole)
    assert torch.equal(source[slice(1, 2), slice(None), slice(2, 8)], whole[1:2, :, 2:8])


def test_one_warning_says_what_it_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "gptq")
    with caplog.at_level(logging.WARNING):
        load_tiny(str(tmp_path))
    [message] = [record.getMessage() for record in caplog.records]
    assert "quantized (gptq: integers of 2, 4 or 8 bits" in message and "dequantized to float32 at load" in message
    assert "they take the memory, and give the speed, of an unquantized model" in message
    assert "as 4-bit weights are not to be kept (dequantize_weights)" in message
    assert "quantization='fp8'" not in message


def test_fp8_checkpoints_hint_at_what_keeps_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "fp8 blocks")
    with caplog.at_level(logging.WARNING):
        load_tiny(str(tmp_path))
    assert "quantization='fp8' keeps them in FP8 on a GPU" in caplog.text
    caplog.clear()
    directory = str(tmp_path)  # several ranks refuse the option, so they do not hint at it
    with caplog.at_level(logging.WARNING):
        load_model(load_hf_config(directory), directory, torch.float32, CPU, max_position=64, ranks=Ranks(0, 2))
    assert "dequantized to float32 at load" in caplog.text and "quantization='fp8'" not in caplog.text


PACK = QUANTIZED["pack-quantized"][0]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method in config.json is 'bitsandbytes': the formats that"),
        ("gptq", {"quant_method": None}, "quant_method in config.json is None"),
        ("gptq", {"bits": 3}, r"quantization_config\.bits in config\.json is 3: only these"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format in config.json is 'marlin'"),
        ("gptq", {"group_size": 0}, "group_size in config.json is 0: it must be positive"),
        ("gptq", {"pack_dtype": "int8"}, "pack_dtype in config.json is 'int8'"),
        ("gptq", {"dynamic": {"+:.*mlp.*": {"bits": 8}}}, r"dynamic in config.json gives layers .*'\+:\.\*mlp"),
        ("awq", {"version": "gemv"}, "version in config.json is 'gemv'"),
        ("awq", {"zero_point": False}, "zero_point in config.json is False"),
        ("awq", {"bits": 8}, "bits in config.json is 8"),
        ("fp8 blocks", {"fmt": "e5m2"}, "fmt in config.json is 'e5m2'"),
        ("fp8 blocks", {"weight_block_size": [128]}, r"weight_block_size in config.json is \[128\]: it must be two"),
        ("pack-quantized", {"format": "nvfp4-pack-quantized"}, r"format in config.json is 'nvfp4-pack-quantized'"),
        ("pack-quantized", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config in config.json"),
        ("pack-quantized", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config in config.json"),
        (
            "pack-quantized",
            {"config_groups": {name: {"weights": {"num_bits": bits}} for name, bits in (("a", 4), ("b", 8))}},
            r"config_groups in config.json have different weights.num_bits \(4, 8\)",
        ),
    ],
)
def test_options_that_cannot_be_read(name: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, name)
    edit_config(tmp_path, quantization_config=QUANTIZED[name][0] | fields)
    with pytest.raises(ValueError, match=message) as raised:
        load_tiny(str(tmp_path))
    assert "is quantized in a way that cannot be read" in str(raised.value)


def without(suffix: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"model.layers.0.mlp.up_proj.{suffix}"]

    return change


def replaced(suffix: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({f"model.layers.0.mlp.up_proj.{suffix}": tensor})


UP = r"model\.layers\.0\.mlp\.up_proj\.weight"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", without("scales"), f"{UP} is quantized by 'gptq', but the checkpoint lacks its scales"),
        ("awq", without("qzeros"), f"{UP} is quantized by 'awq', but the checkpoint lacks its qzeros"),
        ("fp8 blocks", without("weight"), f"{UP} is quantized by 'fp8', but the checkpoint lacks its weight"),
        ("fp8 blocks", without("weight_scale_inv"), f"{UP} is stored as torch.float8_e4m3fn: it is quantized"),
        ("pack-quantized", without("weight_shape"), f"{UP} cannot be dequantized .*lacks its weight_shape"),
        ("gptq", without("qzeros"), f"{UP} cannot be dequantized .*lacks its qzeros"),
        (
            "fp8 blocks",
            replaced("weight_scale_inv", torch.ones(2, 2)),
            f"{UP} cannot be dequantized .*not per block of 32 x 48 of a matrix of 80 x 64",
        ),
        ("gptq", replaced("g_idx", torch.full((64,), 4, dtype=torch.int32)), f"{UP} .*groups up to 4, of 4"),
        ("awq", replaced("qzeros", torch.zeros(3, 10, dtype=torch.int32)), f"{UP} .*do not divide into 4 groups"),
        ("gptq", replaced("qweight", torch.zeros(4, 80, dtype=torch.int32)), f"{UP} has shape .80, 32."),
    ],
)
def test_damaged_matrices_are_named(name: str, change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_tiny(str(tmp_path))


def test_every_format_is_tested() -> None:
    methods = {config["quant_method"] for config, _ in QUANTIZED.values()} | {"mxfp4"}
    assert methods == set(WEIGHT_FORMATS)
