"""Checkpoints that lie or are damaged are refused by name, and take no memory that their files do not have."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.quantized import GPTQ, PACKED, compressed, save_quantized
from tests.models.tiny import edit_config, load_tiny, save, tiny_hf_model
from vllm_blend.models import loader
from vllm_blend.models.gpt_oss import GptOssForCausalLM
from vllm_blend.models.loader import load_hf_config
from vllm_blend.models.stored import opened
from vllm_blend.models.text_parts import text_tensors
from vllm_blend.models.weight_formats import WEIGHT_FORMATS, weight_format
from vllm_blend.models.weight_formats.scales import e4m3_rows, spread
from vllm_blend.models.weights import find_weight_files

pytestmark = pytest.mark.cpu_only
LAYER = "model.layers.1.mlp.up_proj"
NAN = float("nan")


def change(folder: Path, **parts: Any) -> None:
    """Change parts of one matrix by functions of what they are; give others as they are; leave out what is None."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for part, new in parts.items():
        old = tensors.pop(f"{LAYER}.{part}", None)
        value = new(old) if callable(new) else new
        if value is not None:
            tensors[f"{LAYER}.{part}"] = value.contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "parts", "said"),
    [
        ("gptq", {"scales": lambda t: t[:, :1]}, "scales are"),
        ("gptq", {"scales": lambda t: t * NAN}, "scales has numbers that are not finite"),
        ("gptq", {"scales": lambda t: t.int()}, "scales is stored as torch.int32"),
        ("gptq", {"g_idx": lambda t: t.float()}, "g_idx is torch.float32"),
        ("gptq", {"g_idx": lambda t: t - 1}, "g_idx has groups from -1"),
        ("gptq", {"g_idx": lambda t: t[:, None]}, "g_idx is torch.int32"),
        ("gptq", {"qzeros": lambda t: torch.cat([t, t])}, "qzeros hold"),
        ("gptq", {"weight": torch.ones(2, 2)}, "both as it is and quantized"),
        ("awq", {"scales": lambda t: t * NAN}, "scales has numbers that are not finite"),
        ("awq", {"scales": lambda t: t[::2], "qzeros": lambda t: t[::2]}, "group_size is 16"),
        ("fp8 matrices", {"weight_scale": torch.tensor(NAN)}, "weight_scale has numbers that are not finite"),
        ("fp8 matrices", {"weight_scale_inv": torch.ones(1)}, "both weight_scale_inv and weight_scale"),
        ("fp8 matrices", {"weight_scale": lambda t: None}, "lacks the scales"),
        ("float-quantized rows", {"weight_scale": lambda t: t[:, :, None]}, "scales of shape"),
        ("float-quantized rows", {"weight_scale": lambda t: t[:, :0]}, "scales of shape"),
        ("pack-quantized", {"weight": torch.ones(2, 2)}, "both weight and weight_packed"),
        ("pack-quantized", {"weight_shape": torch.tensor(64)}, "weight_shape has the shape"),
        ("pack-quantized", {"weight_packed": lambda t: torch.cat([t, t], 1)}, "num_bits"),
        ("pack-quantized", {"weight_packed": lambda t: t[:1], "weight_scale": lambda t: t[:1]}, "instead of"),
        ("pack-quantized, reordered", {"weight_g_idx": lambda t: t - 1}, "weight_g_idx has groups from -1"),
        ("pack-quantized, reordered", {"weight_g_idx": lambda t: t[:1]}, "weight_g_idx is torch.int32"),
        ("pack-quantized, reordered", {"weight_scale": lambda t: t[:1]}, "of each of"),
        ("pack-quantized", {"weight_zero_point": lambda t: torch.tensor([99], dtype=torch.int8)}, "99 to 99"),
    ],
)  # fmt: skip
def test_a_matrix_that_lies_is_named(name: str, parts: dict[str, Any], said: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, name)
    change(tmp_path, **parts)
    with pytest.raises(ValueError, match=said) as error:
        load_tiny(str(tmp_path))
    assert f"{LAYER}.weight" in str(error.value)


def test_a_group_size_that_lies_is_named(tmp_path: Path) -> None:
    """Without g_idx it says which scale belongs to an input: a larger one would use half of the scales for all."""
    save_quantized(tmp_path, "gptq, no index")
    edit_config(tmp_path, quantization_config=GPTQ | {"group_size": 32})
    with pytest.raises(ValueError, match="in groups of 32 \\(group_size\\)"):
        load_tiny(str(tmp_path))


@pytest.mark.parametrize("size", [32, 8])
@pytest.mark.parametrize("name", ["pack-quantized", "pack-quantized, reordered"])
def test_a_group_size_that_the_scales_do_not_have_is_named(size: int, name: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, name)
    config = compressed("pack-quantized", num_bits=4, **PACKED | {"group_size": size})
    edit_config(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=rf"groups of 16, but config_groups\.\*\.weights\.group_size is {size}"):
        load_tiny(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("gptq", "quantization_config in config.json is 'gptq': it must be an object"),
        ({"quant_method": "gptq", "bits": 4.0}, "quantization_config.bits in config.json is 4.0"),
        (GPTQ | {"group_size": True}, "quantization_config.group_size in config.json is True"),
        (GPTQ | {"dynamic": ["x"]}, "quantization_config.dynamic in config.json"),
        (GPTQ | {"dynamic": {"x": 3}}, "quantization_config.dynamic.x in config.json is 3"),
        ({"quant_method": "awq", "group_size": "128"}, "quantization_config.group_size in config.json is '128'"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "config_groups in config.json is"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": 3}}, "config_groups.g in config.json is 3"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": "x"}}},
            "config_groups.g.weights in config.json is 'x'",
        ),
        (compressed("pack-quantized", **PACKED | {"group_size": "16"}), "weights.group_size in config.json is '16'"),
        ({"quant_method": "compressed-tensors", "sparsity_config": "x"}, "sparsity_config in config.json is 'x'"),
    ],
)
def test_a_field_that_lies_is_named(fields: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        weight_format(SimpleNamespace(quantization_config=fields))


def test_a_block_takes_no_more_memory_than_its_matrix() -> None:
    assert spread(torch.ones(1, 2), (4, 8), (2**70, 4)).shape == (4, 8)


def test_scales_of_groups_are_not_those_of_rows() -> None:
    assert e4m3_rows(torch.ones(32, 64).to(torch.float8_e4m3fn), torch.ones(16, 2)) is None


@pytest.mark.parametrize(
    ("size", "scale", "said"),
    [(16, 255, "not finite"), (32, 127, "32 bytes, not 16"), (16, None, "scales torch.uint8")],
)
def test_mxfp4_that_lies_is_named(size: int, scale: int | None, said: str, tmp_path: Path) -> None:
    blocks = torch.full((2, 8, 2, size), 0x11, dtype=torch.uint8)
    scales = torch.full((2, 8, 2 if scale else 1), scale or 127, dtype=torch.uint8)
    save_file({"experts.x_blocks": blocks, "experts.x_scales": scales}, tmp_path / "x.safetensors")
    with opened([tmp_path / "x.safetensors"]) as stored, pytest.raises(ValueError, match=said) as error:
        WEIGHT_FORMATS["mxfp4"]({}).combine(stored)["experts.x"].source(torch.device("cpu"))
    assert "experts.x" in str(error.value)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1).expand(10**12), torch.eye(4).to_sparse(), torch.zeros(10**6, 10**6, device="meta")],
    ids=["repeated", "sparse", "without values"],
)
def test_pickled_tensors_that_are_not_in_the_file_are_named(tensor: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"lm_head.weight": tensor}, tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"lm_head\.weight"), opened([tmp_path / "x.bin"]):
        pass


@pytest.mark.parametrize("new_format", [True, False])
def test_any_damaged_byte_of_a_pickle_is_an_error_with_its_path(new_format: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.arange(4.0)}, path, _use_new_zipfile_serialization=new_format)
    whole, refused = path.read_bytes(), 0
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            with opened([path]):
                pass
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 20


@pytest.mark.parametrize("name", ["../x.safetensors", "/tmp/x.safetensors", "", "x" * 5000])
def test_an_index_names_files_of_its_directory_alone(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"index\.json names .* no file in its directory"):
        find_weight_files(folder)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"weight_map": {}}', '{"weight_map": {"a": 5}}'])
def test_an_index_without_names_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="is not an index of weights"):
        find_weight_files(tmp_path)


def test_a_tensor_under_an_older_and_a_newer_name_is_named(tmp_path: Path) -> None:
    names = ("language_model.model.norm.weight", "model.language_model.norm.weight")
    save_file({name: torch.ones(1) for name in names}, tmp_path / "x.safetensors")
    with opened([tmp_path / "x.safetensors"]) as stored, pytest.raises(ValueError, match=r"norm\.weight and .*norm"):
        text_tensors(stored)


@pytest.mark.parametrize("name", ["swiglu_alpha", "swiglu_limit"])
@pytest.mark.parametrize("value", [-1.0, NAN, float("inf")])
def test_a_clamp_that_is_no_number_is_named(name: str, value: float) -> None:
    config = tiny_hf_model("gpt_oss").config
    setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        GptOssForCausalLM.spec(config)


def test_a_window_that_is_negative_is_named() -> None:
    config = tiny_hf_model("gpt_oss").config
    config.sliding_window = -5
    with pytest.raises(ValueError, match="sliding_window = -5"):
        GptOssForCausalLM.spec(config)


def test_a_text_config_that_the_model_type_does_not_know_is_named(tmp_path: Path) -> None:
    fields = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "llama", "text_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"no text_config that its model_type \('llama'\) knows"):
        load_hf_config(str(tmp_path))


def test_layers_that_no_file_has_are_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_hf_model("llama", num_hidden_layers=2), tmp_path)
    edit_config(tmp_path, num_hidden_layers=3000)
    monkeypatch.setattr(loader, "_build", lambda *_: pytest.fail("built"))
    with pytest.raises(ValueError, match=r"num_hidden_layers in config\.json is 3000, but the checkpoint has 2 layers"):
        load_tiny(str(tmp_path))


def test_a_vocabulary_that_no_file_has_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_hf_model("llama", vocab_size=97), tmp_path)
    edit_config(tmp_path, vocab_size=10**12)
    monkeypatch.setattr(loader, "_build", lambda *_: pytest.fail("built"))
    said = r"vocab_size in config\.json is 1000000000000, but model\.embed_tokens\.weight in the checkpoint has 97 rows"
    with pytest.raises(ValueError, match=said):
        load_tiny(str(tmp_path))


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [f"{LAYER}.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_named(name: str, value: float, tmp_path: Path) -> None:
    save(tiny_hf_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[3] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} \(in model\.safetensors\) has NaN, or numbers that are infinite"):
        load_tiny(str(tmp_path))


def test_large_weights_are_finite(tmp_path: Path) -> None:
    """Though their sum is not, in their type."""
    save(tiny_hf_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{LAYER}.weight"].fill_(3e38)
    save_file(tensors, path, {"format": "pt"})
    load_tiny(str(tmp_path))
