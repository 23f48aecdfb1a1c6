"""Checkpoints whose 4-bit weights stay as they are: the dequantized model's answers, with less memory."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.blend.prompts import tiny_prompt
from tests.distributed.ranks import CPU, on_ranks
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, run
from tests.engine.tiny_tokenizers import byte_level
from tests.models.int4_models import LENGTH, WIDE, linear_layers, load, logits, warnings_of
from tests.models.quantized import save_quantized
from tests.models.tiny import edit_config, hf_logits, prompt, tiny_hf_model
from vllm_blend.distributed.ranks import ONE_RANK
from vllm_blend.layers.linear import Linear
from vllm_blend.models.int4_layers import why_none
from vllm_blend.models.stored import PlainTensor
from vllm_blend.models.weight_formats import weight_format
from vllm_blend.models.weight_formats.base import DequantizedTensor
from vllm_blend.ops import Int4Matrix, bindings, unpack_int4

pytestmark = pytest.mark.cpu_only
KEPT = (
    "pack-quantized",
    "pack-quantized, zero points",
    "awq",
    "gptq",
    "gptq, second version",
    "gptq, no index",
    "gptq, no zero points",
)


def nbytes(model: Any) -> int:
    kept = sum(layer.int4.nbytes for layer in linear_layers(model) if layer.int4 is not None)
    return kept + int(sum(parameter.nbytes for parameter in model.parameters()))


@pytest.mark.parametrize("name", KEPT)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Logits equal those of transformers' model with the numbers that the format's definition gives."""
    meant = save_quantized(tmp_path, name, **WIDE)
    expected = tiny_hf_model("llama", **WIDE)
    expected.load_state_dict({key: matrix.float() for key, matrix in meant.items()})
    model = load(tmp_path)
    assert all(layer.int4 is not None and layer.weight.numel() == 0 for layer in linear_layers(model))
    theirs = hf_logits(expected, prompt(LENGTH))
    assert theirs.std() > 0.5
    torch.testing.assert_close(logits(model), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["qwen2", "phi3", "gemma3"])
def test_logits_are_those_of_the_dequantized_model(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """With biases, with Q, K and V as one matrix in the checkpoint, and in a layer of another family."""
    save_quantized(tmp_path, "awq", architecture, **WIDE)
    model, dequantized = load(tmp_path, dtype=dtype), load(tmp_path, False, dtype)
    assert all(layer.int4 is not None for layer in linear_layers(model))
    assert all(layer.int4 is None for layer in linear_layers(dequantized))
    expected = logits(dequantized)
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}[dtype] * float(expected.std())
    assert (logits(model) - expected).abs().max() < bound


def test_the_weights_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    """To the bit, whatever the dtype rounds."""
    save_quantized(tmp_path, "gptq", **WIDE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pairs = zip(
            linear_layers(load(tmp_path, dtype=dtype)), linear_layers(load(tmp_path, False, dtype)), strict=True
        )
        for kept, dequantized in pairs:
            assert isinstance(kept.int4, Int4Matrix)
            assert torch.equal(unpack_int4(kept.int4, dtype), dequantized.weight)


def test_the_memory_is_less(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "awq", **WIDE)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    [message] = [record.getMessage() for record in caplog.records if "4 bits" in record.getMessage()]
    assert message.startswith("21 matrices of ") and "instead of" in message
    assert not warnings_of(caplog)
    numbers = sum(layer.int4.shape[0] * layer.int4.shape[1] for layer in linear_layers(model) if layer.int4 is not None)
    kept = numbers // 2 + numbers // 16 * 3  # a scale of two bytes and a zero point of one for every 16 inputs
    assert nbytes(load(tmp_path, False)) - nbytes(model) == numbers * 4 - kept


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gptq, reordered", "the inputs of a group do not lie together (desc_act)"),
        ("pack-quantized, reordered", "the inputs of a group do not lie together (desc_act)"),
        ("gptq, 8 bits", "its integers have 8 bits"),
        ("gptq, 2 bits", "its integers have 2 bits"),
        ("pack-quantized, 8 bits", "its numbers are integers of 8 bits"),
        ("int-quantized", "its numbers are e4m3 or int8"),
    ],
)
def test_what_cannot_stay_is_dequantized_and_named(
    name: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantized(tmp_path, name, **WIDE)
    model = load(tmp_path)
    assert all(layer.int4 is None for layer in linear_layers(model))
    [message] = warnings_of(caplog)
    assert message.startswith("21 quantized matrices of ") and message.endswith(reason)
    assert torch.equal(logits(model), logits(load(tmp_path, False)))


def test_only_the_layers_that_do_not_fit_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "awq")
    model = load(tmp_path)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert {name.rpartition(".")[2] for name, layer in layers.items() if layer.int4 is None} == {"down_proj"}
    [message] = warnings_of(caplog)
    assert "3 quantized matrices" in message and "such as model.layers.0.mlp.down_proj.weight" in message
    assert "the layer has 80 inputs and 64 outputs, which must be multiples of 32 and 16" in message
    torch.testing.assert_close(logits(model), logits(load(tmp_path, False)), rtol=1e-4, atol=1e-4)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the first layer's k_proj, or leave them out."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        key = f"model.layers.0.self_attn.k_proj.{name}"
        stored.pop(key, None)
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, path, {"format": "pt"})


def test_matrices_of_one_product_must_be_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "pack-quantized", **WIDE)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    [group] = config["config_groups"].values()
    wider = group | {"targets": ["re:.*k_proj"], "weights": group["weights"] | {"group_size": 32}}
    edit_config(tmp_path, quantization_config=config | {"config_groups": {"group_0": group, "group_1": wider}})
    rows = len(load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.k_proj.weight_scale"])
    change(tmp_path, weight_scale=torch.full((rows, 2), 0.03).half())
    model = load(tmp_path)
    [message] = warnings_of(caplog)
    assert message.startswith("3 quantized matrices") and "groups of several sizes" in message
    assert [layer.int4 is None for layer in linear_layers(model)] == [True, *[False] * 11]


def test_a_matrix_beside_unquantized_ones_is_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meant = save_quantized(tmp_path, "awq", **WIDE)
    weight = meant["model.layers.0.self_attn.k_proj.weight"].float().contiguous()
    change(tmp_path, qweight=None, qzeros=None, scales=None, weight=weight)
    model = load(tmp_path)
    [message] = warnings_of(caplog)
    assert message.startswith("2 quantized matrices") and message.endswith("are not all quantized")
    torch.testing.assert_close(logits(model), logits(load(tmp_path, False)), rtol=1e-4, atol=1e-4)


def test_a_damaged_matrix_is_an_error_once(tmp_path: Path) -> None:
    save_quantized(tmp_path, "awq", **WIDE)
    change(tmp_path, scales=torch.full((4, 32), torch.nan).half())
    with pytest.raises(ValueError, match=r"k_proj\.weight cannot be dequantized .* not finite") as raised:
        load(tmp_path)
    assert str(raised.value).count("k_proj.weight") == 1


@pytest.mark.parametrize("name", ["awq", "pack-quantized"])
@pytest.mark.parametrize("outputs", [0, 8])
def test_scales_of_fewer_outputs_are_refused(name: str, outputs: int, tmp_path: Path) -> None:
    """The kernels would read behind the scales that are there."""
    save_quantized(tmp_path, name, **WIDE)
    if name == "awq":
        change(tmp_path, scales=torch.ones(4, outputs).half(), qzeros=torch.zeros(4, outputs // 8, dtype=torch.int32))
        said = rf"scales \(4, {outputs}\) and zero points \(4, {outputs}\) are not those of 32 outputs"
    else:
        change(tmp_path, weight_scale=torch.ones(32, 0) if outputs == 0 else torch.ones(outputs, 4))
        said = "64 inputs with 0 scales" if outputs == 0 else r"scales of shape \(8, 4\)"
    with pytest.raises(ValueError, match=rf"k_proj\.weight cannot be dequantized .*: {said}"):
        load(tmp_path)


@pytest.mark.parametrize("rows", [16, 64])
def test_a_matrix_of_other_rows_than_it_says_is_refused(rows: int, tmp_path: Path) -> None:
    save_quantized(tmp_path, "pack-quantized", **WIDE)
    change(tmp_path, weight_packed=torch.ones(rows, 8, dtype=torch.int32), weight_scale=torch.ones(rows, 4))
    said = rf"k_proj\.weight cannot be dequantized .*: they make up \({rows}, 64\) instead of \(32, 64\)"
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_scales_of_one_product_must_be_of_one_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch has no type for both e4m3 and float16."""
    save_quantized(tmp_path, "awq", **WIDE)
    change(tmp_path, scales=torch.full((4, 32), 0.03).to(torch.float8_e4m3fn))
    model = load(tmp_path)
    [message] = warnings_of(caplog)
    assert message.startswith("3 quantized matrices") and message.endswith("have scales of several types")
    assert [layer.int4 is None for layer in linear_layers(model)] == [True, *[False] * 11]


@pytest.mark.parametrize("name", KEPT)
def test_a_matrix_is_where_it_was_asked_for(name: str, tmp_path: Path) -> None:
    """Though another device is the default one, as a CPU is for a model that goes to a GPU."""
    save_quantized(tmp_path, name, **WIDE)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    read_as, path = weight_format(SimpleNamespace(quantization_config=config)), tmp_path / "model.safetensors"
    assert read_as is not None
    stored = {key: PlainTensor(key, path, tuple(tensor.shape), tensor) for key, tensor in load_file(path).items()}
    matrix = read_as.combine(stored)["model.layers.0.self_attn.k_proj.weight"]
    assert isinstance(matrix, DequantizedTensor)
    with torch.device("meta"):
        found = matrix.int4(CPU)
    assert {part.device for part in (found.numbers, found.zeros, found.scales)} == {CPU}


def test_experts_are_dequantized_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "awq", "qwen3_moe", moe_intermediate_size=48)
    load(tmp_path)
    assert any("only linear layers keep 4-bit weights, not experts" in message for message in warnings_of(caplog))


def test_ranks_dequantize_their_shares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "awq", **WIDE)
    [expected] = on_ranks(1, lambda ranks: logits(load(tmp_path, False, ranks=ranks)))
    caplog.clear()
    shared, _ = on_ranks(2, lambda ranks: logits(load(tmp_path, ranks=ranks)))
    torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-4)
    [message] = warnings_of(caplog)
    assert "as tensor_parallel_size=2 divides the layers" in message


def test_where_no_layer_can_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_none(torch.bfloat16, CPU, ONE_RANK) is None
    monkeypatch.setenv(bindings.DISABLE_VARIABLE, "1")
    bindings.reload()
    try:
        assert why_none(torch.bfloat16, CPU, ONE_RANK) == "the compiled CPU kernels are not there"
    finally:
        monkeypatch.undo()
        bindings.reload()


def test_the_engine_keeps_them_unless_told_otherwise(tmp_path: Path) -> None:
    """Blended in full, or not at all, the answers are those of full prefill with dequantized weights."""
    meant = save_quantized(tmp_path, "awq", vocab_size=TINY_VOCABULARY, **WIDE)
    byte_level().save_pretrained(tmp_path)
    hf_model = tiny_hf_model("llama", vocab_size=TINY_VOCABULARY, **WIDE)
    hf_model.load_state_dict({key: matrix.float() for key, matrix in meant.items()})
    params = greedy(8, logprobs=3, ignore_eos=True)
    whole = tiny_prompt(blend_selector="value_deviation", blend_recompute_ratio=1.0)
    outputs = []
    for options in ({}, {"dequantize_weights": True}):
        with engine(str(tmp_path), enable_blending=True, block_size=BLOCK_SIZE, **options) as llm:
            layers = linear_layers(llm.llm_engine.model_executor.driver_worker.model_runner.model)
            assert {layer.int4 is None for layer in layers} == {bool(options)}
            for _ in range(2):  # the chunks are new, then known
                [output] = run(llm, whole, params)
                assert output.blend is not None and output.blend.num_reused_tokens == 0
                assert_logprobs_match(output, hf_model)
            outputs.append(run(llm, tiny_prompt(blend_selector="value_deviation"), params)[0])
    assert outputs[0].blend is not None and outputs[0].blend.num_reused_tokens > 0
    assert_same_logprobs(outputs[0], outputs[1])
