"""FP8 linear layers on the CPU: the plain torch twins, how weights get in, and who is turned away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.tiny import CONTEXT, PagedRunner, prompt, save, tiny_hf_model
from vllm_blend import LLM, ops
from vllm_blend.config import ModelConfig
from vllm_blend.distributed.sharding import Share
from vllm_blend.engine import setup
from vllm_blend.engine_args import EngineArgs
from vllm_blend.layers.linear import GateUpLinear, Linear, QKVLinear
from vllm_blend.layers.quantization import QuantizedDestination, QuantizingRMSNorm, check_quantization
from vllm_blend.models.llama import LlamaForCausalLM
from vllm_blend.models.loader import construct_as, fill_dummy, load_hf_config, load_model
from vllm_blend.models.registry import resolve_model_class
from vllm_blend.models.weights import checkpoint_destinations, fill_from_files
from vllm_blend.ops.fp8 import (
    QuantizedRows,
    UnscaledProduct,
    fused_add_rms_norm_quant_reference,
    quantize_rows_reference,
    quantized_linear_reference,
    silu_and_mul_quant_reference,
)

CPU = torch.device("cpu")


def whole(rows: QuantizedRows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()[:, None]


def same(a: QuantizedRows, b: QuantizedRows) -> bool:
    return torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.scales, b.scales)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fp8_model(architecture: str, folder: Path, quantization: str | None = "fp8", **overrides: Any) -> Any:
    """A tiny checkpoint in `folder`, loaded in bfloat16 without asking whether the device has FP8 products."""
    save(tiny_hf_model(architecture, **overrides), folder)
    config = load_hf_config(str(folder))
    with construct_as(torch.bfloat16, CPU):
        model = resolve_model_class(config)(config, CONTEXT, quantization)
    fill_from_files(model, [folder / "model.safetensors"])
    return model


def test_rows_fill_the_range_of_e4m3() -> None:
    x = randn(40, 64, dtype=torch.float32) * torch.logspace(-11, 20, 40)[:, None]
    rows = quantize_rows_reference(x)
    assert (rows.values.float().abs().amax(1) == 448).all()
    error = (whole(rows) - x).abs()
    # Three bits of mantissa: half a step is 1/16 of the number, or half of the smallest subnormal (2^-9).
    assert (error <= torch.maximum(x.double().abs() / 16, rows.scales[:, None].double() * 2**-10) * 1.001).all()


def test_rows_of_zeros_and_of_what_is_no_number() -> None:
    x = torch.zeros(3, 16)
    x[1, 3], x[2, 3] = float("nan"), float("inf")
    rows = whole(quantize_rows_reference(x))
    assert (rows[0] == 0).all()
    assert rows[1, 3].isnan()
    assert rows[2, 3].isnan()


def test_the_product_is_that_of_the_quantised_matrices() -> None:
    x, weight = (quantize_rows_reference(randn(*shape)) for shape in ((5, 32), (48, 32)))
    bias = randn(48)
    expected = whole(x) @ whole(weight).T
    for b in (None, bias):
        out = quantized_linear_reference(x, weight, b, torch.bfloat16)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected + (0 if b is None else b.double()), rtol=2**-8, atol=1e-3)


def test_readers_of_an_unscaled_product_apply_its_scales() -> None:
    values, residual = randn(7, 64), randn(7, 64, seed=1)
    product = UnscaledProduct(values, torch.rand(7) + 0.5, torch.rand(64) + 0.5)
    scaled = values.double() * product.row_scales.double()[:, None] * product.column_scales.double()
    assert torch.allclose(product.scaled().double(), scaled, rtol=1e-6)
    weight = randn(64, seed=2)
    got, total = fused_add_rms_norm_quant_reference(product, residual, weight, 1e-5)
    assert torch.equal(total, (product.scaled() + residual).bfloat16())
    assert same(got, ops.rms_norm_quant(total, weight, 1e-5))
    gate, up = scaled.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    got = silu_and_mul_quant_reference(product)
    # What e4m3 rounds to may flip with the last bit of bfloat16.
    assert (whole(got) - expected).norm() <= 0.04 * expected.norm()


def test_packing_is_exact() -> None:
    weight, x = randn(96, 32), randn(5, 32, seed=1)
    with construct_as(torch.bfloat16, CPU):
        packed = QKVLinear(32, Share.whole(4), Share.whole(1), 16, quantization="fp8")
        parts = [Linear(32, size, quantization="fp8") for size in packed.sizes]
    for view, part, matrix in zip(packed.checkpoint_views().values(), parts, weight.split(packed.sizes), strict=True):
        view.copy_(matrix)
        part.weight_destination().copy_(matrix)
    assert torch.equal(packed(x), torch.cat([part(x) for part in parts], -1))


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_takes_activations_quantised_or_not(bias: bool) -> None:
    with construct_as(torch.bfloat16, CPU):
        linear = Linear(64, 32, bias, quantization="fp8")
    weight = randn(32, 64)
    linear.weight_destination().copy_(weight)
    if linear.bias is not None:
        linear.bias.copy_(randn(32, seed=3))
    x = randn(9, 64, seed=1)
    out = linear(x)
    assert torch.equal(out, linear(ops.quantize_rows(x)))
    expected = x.double() @ weight.double().T + (0 if linear.bias is None else linear.bias.double())
    assert (out - expected).norm() <= 0.05 * expected.norm()
    product = linear.product(x)  # the CPU never leaves one unscaled
    assert isinstance(product, torch.Tensor) and torch.equal(product, out)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_checkpoint_is_quantised_as_it_is_read(architecture: str, tmp_path: Path) -> None:
    model = fp8_model(architecture, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    destinations = checkpoint_destinations(model)
    assert destinations.keys() == stored.keys()
    for name, tensor in stored.items():
        found = destinations[name]
        if isinstance(found, torch.Tensor):
            assert name.endswith("bias") or "norm" in name or "embed_tokens" in name or "lm_head" in name
            assert torch.equal(found, tensor.bfloat16())
        else:
            assert isinstance(found, QuantizedDestination)
            assert same(found.rows, quantize_rows_reference(tensor.bfloat16()))
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert len(linears) == 4 * 3
    assert all(linear.weight.dtype == torch.float8_e4m3fn for linear in linears)
    assert model.lm_head.weight.dtype == model.model.norm.weight.dtype == torch.bfloat16


@pytest.mark.cpu_only
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_model_stays_near_the_one_in_full_precision(architecture: str, tmp_path: Path) -> None:
    ids = prompt(40)
    fp8 = PagedRunner(fp8_model(architecture, tmp_path)).step([(0, ids)])
    full = PagedRunner(fp8_model(architecture, tmp_path, None)).step([(0, ids)])
    # Large random weights double an error from layer to layer; a wrong scale or row is off by more than the norm.
    assert 0 < (fp8 - full).norm() <= 0.4 * full.norm()


def test_dummy_weights_are_those_of_the_model_in_full_precision(tmp_path: Path) -> None:
    models = [fp8_model("llama", tmp_path, quantization) for quantization in ("fp8", None)]
    for model in models:
        fill_dummy(model)
    for fp8, full in zip(models[0].modules(), models[1].modules(), strict=True):
        if isinstance(fp8, Linear) and fp8.weight_scale is not None:
            expected = quantize_rows_reference(full.weight)
            assert same(QuantizedRows(fp8.weight, fp8.weight_scale), expected)
        if isinstance(fp8, QuantizingRMSNorm):
            assert (fp8.weight == 1).all()
    assert torch.equal(models[0].lm_head.weight, models[1].lm_head.weight)


def test_no_matrix_is_allocated_in_full_precision() -> None:
    config = tiny_hf_model("llama").config
    config.update({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128})
    config.update({"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000})
    with construct_as(torch.bfloat16, torch.device("meta")):
        model = LlamaForCausalLM(config, 16, "fp8")
    linears = sum(p.numel() for m in model.modules() if isinstance(m, Linear) for p in m.parameters())
    size = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()] if t.is_meta)
    scales = 32 * 4 * (6144 + 4096 + 28672 + 4096)
    others = 2 * (2 * 32000 * 4096 + (2 * 32 + 1) * 4096)
    assert linears > 6.9e9
    assert linears + scales + others <= size <= linears + scales + others + 2 * 16 * 64 * 4  # the RoPE tables


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("int4", "quantization='int4' is unknown: use 'fp8', or leave it out"),
        ("", "quantization='' is unknown: use 'fp8', or leave it out"),
        (8, "quantization=8 must be a string or None, not int"),
    ],
)
def test_an_unknown_quantization_says_what_there_is(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("some/model", quantization=value).create_engine_config()


def test_a_device_without_fp8_products_is_an_error_at_start(tmp_path: Path) -> None:
    save(tiny_hf_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=r"quantization='fp8' needs a GPU .*8\.9.*the device is the CPU: leave quant"):
        LLM(str(tmp_path), tokenizer="inputs/demo-model", device="cpu", dtype="bfloat16", quantization="fp8")
    config = load_hf_config(str(tmp_path))
    with pytest.raises(ValueError, match="dtype is float32: use dtype='bfloat16'"):
        load_model(config, "", torch.float32, "cpu", "dummy", max_position=CONTEXT, quantization="fp8")


def test_an_old_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"the device is NVIDIA A100, which has 8\.0"):
        check_quantization("fp8", torch.bfloat16, torch.device("cuda", 7))
    check_quantization(None, torch.float32, CPU)


def test_sizes_that_fp8_products_do_not_take() -> None:
    with pytest.raises(ValueError, match="whose sizes are multiples of 16, but the model has one of 48 x 40"):
        GateUpLinear(40, Share.whole(24), quantization="fp8")


def test_chunk_kv_of_fp8_weights_has_keys_of_its_own(tmp_path: Path) -> None:
    save(tiny_hf_model("llama"), tmp_path)
    config = load_hf_config(str(tmp_path))
    model = load_model(config, str(tmp_path), torch.bfloat16, "cpu", max_position=CONTEXT)
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(model=model),
        num_ranks=1,
        dtype=torch.bfloat16,
        num_layers=3,
        shape=SimpleNamespace(kv_heads=2, head_dim=16, dtype=torch.bfloat16),
    )
    for load_format in ("auto", "dummy"):
        configs = [
            ModelConfig(str(tmp_path), load_format=load_format, quantization=quantization)
            for quantization in (None, "fp8")
        ]
        digests = {setup.fingerprint(config, worker, None).digest for config in configs}
        assert len(digests) == 2
