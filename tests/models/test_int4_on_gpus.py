"""Checkpoints of 4-bit weights as a GPU has them, on a CPU: what is kept, what is not, and that answers stay.

PyTorch's two operators for that layout run from their definition here; on a GPU they are its own
(tests/gpu/test_int4_engine.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, run
from tests.engine.tiny_tokenizers import byte_level
from tests.models.int4_models import WIDE, linear_layers, load, logits, warnings_of
from tests.models.quantized import IN_WIDE_GROUPS, save_quantized
from tests.ops.int4_emulation import operators_on_cpu
from vllm_blend.distributed.ranks import ONE_RANK
from vllm_blend.layers.linear import Linear
from vllm_blend.models.int4_layers import why_none
from vllm_blend.models.int4_layouts import INT4_LAYOUTS
from vllm_blend.models.weight_formats import awq
from vllm_blend.ops import Int4Tiles, int4_tiles, unpack_tiles

pytestmark = pytest.mark.cpu_only
GPU = torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that has 4-bit weights as a GPU has them, and says that it is a recent one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(INT4_LAYOUTS, "cpu", INT4_LAYOUTS["cuda"])
    with operators_on_cpu():
        yield


def rms(differences: torch.Tensor) -> float:
    return float(differences.float().pow(2).mean().sqrt())


@pytest.mark.parametrize("name", IN_WIDE_GROUPS)
def test_weights_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    """Within the rounding of scales and of zero points to bfloat16."""
    save_quantized(tmp_path, name, in_wide_groups=True, **WIDE)
    for kept, dequantized in zip(
        linear_layers(load(tmp_path, dtype=BF16)), linear_layers(load(tmp_path, False, BF16)), strict=True
    ):
        assert isinstance(kept.int4, Int4Tiles) and kept.weight.numel() == 0
        step = dequantized.weight.abs().max() / 10  # of numbers up to 10 steps away from the zero point
        assert (unpack_tiles(kept.int4).float() - dequantized.weight.float()).abs().max() < step / 8


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gemma3"])
def test_logits_are_those_of_these_weights(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By unpacked matrices alone, with PyTorch's product for decoding, and with it for everything: rounding to bfloat16
    costs no more than in a model that has these weights in bfloat16."""
    save_quantized(tmp_path, "awq", architecture, in_wide_groups=True, **WIDE)
    model, plain, exact = load(tmp_path, dtype=BF16), load(tmp_path, False, BF16), load(tmp_path, False)
    for kept, *layers in zip(*map(linear_layers, (model, plain, exact)), strict=True):
        assert isinstance(kept.int4, Int4Tiles)
        for layer in layers:
            layer.weight.copy_(unpack_tiles(kept.int4))
    rounded, expected = logits(plain), logits(exact)
    for rows in (0, 1, 1000):
        monkeypatch.setattr(int4_tiles, "KERNEL_ROWS", rows)
        ours = logits(model)
        assert torch.equal(ours, rounded) or rows > 0
        assert rms(ours - expected) <= 1.3 * rms(rounded - expected)


def test_the_memory_is_less(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "awq", in_wide_groups=True, **WIDE)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path, dtype=BF16)
    kept = [layer.int4 for layer in linear_layers(model) if layer.int4 is not None]
    numbers = sum(matrix.shape[0] * matrix.shape[1] for matrix in kept)
    assert sum(matrix.nbytes for matrix in kept) == numbers // 2 + numbers // 32 * 4
    [message] = [record.getMessage() for record in caplog.records if "4 bits" in record.getMessage()]
    assert message.startswith("21 matrices of ") and message.endswith(" in bfloat16")
    assert not warnings_of(caplog)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_dequantized_and_told(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_quantized(tmp_path, "awq", in_wide_groups=True, **WIDE)
    model = load(tmp_path, dtype=dtype)
    assert all(layer.int4 is None for layer in linear_layers(model))
    [message] = warnings_of(caplog)
    name = str(dtype).removeprefix("torch.")
    assert f"are dequantized to {name} at load, as 4-bit products on a GPU take bfloat16, not {name}" in message
    assert "(dtype='bfloat16' keeps the 4 bits)" in message


def test_why_no_layer_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_none(BF16, GPU, ONE_RANK) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_none(BF16, GPU, ONE_RANK) == (
        "4-bit products need a GPU of compute capability 8.0 or later, and this one has 7.5"
    )


def test_running_out_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    save_quantized(tmp_path, "awq", in_wide_groups=True, **WIDE)
    monkeypatch.setattr(awq, "unpack", full)
    for keeps in (True, False):
        with pytest.raises(torch.OutOfMemoryError):
            load(tmp_path, keeps, BF16)


def test_the_engine_blends_with_them(tmp_path: Path) -> None:
    """Recomputing everything equals no blend at all, and KV of these weights is not that of dequantized ones."""
    save_quantized(tmp_path, "awq", in_wide_groups=True, vocab_size=TINY_VOCABULARY, **WIDE)
    byte_level().save_pretrained(tmp_path)
    params = greedy(8, logprobs=3, ignore_eos=True)
    whole = tiny_prompt(blend_selector="value_deviation", blend_recompute_ratio=1.0)
    keys = set()
    for options in ({}, {"dequantize_weights": True}):
        with engine(str(tmp_path), enable_blending=True, block_size=BLOCK_SIZE, dtype="bfloat16", **options) as llm:
            keys.add(llm.llm_engine.fingerprint.digest)
            layers = linear_layers(llm.llm_engine.model_executor.driver_worker.model_runner.model)
            assert {isinstance(layer.int4, Int4Tiles) for layer in layers} == {not options}
            first, second = (run(llm, whole, params)[0] for _ in range(2))  # the chunks are new, then known
            assert first.outputs[0].token_ids == second.outputs[0].token_ids
            assert second.blend is not None and second.blend.num_reused_tokens == 0
    assert len(keys) == 2


def test_small_groups_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(tmp_path, "gptq", **WIDE)
    assert all(layer.int4 is None for layer in linear_layers(load(tmp_path, dtype=BF16)))
    [message] = warnings_of(caplog)
    assert message.startswith("21 quantized matrices of ")
    assert message.endswith("groups of 16 inputs are not multiples of 32, as a GPU needs them")


def test_only_the_layers_that_do_not_fit_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int4_tiles, "IN_MULTIPLE", 64)
    save_quantized(tmp_path, "awq", in_wide_groups=True, **WIDE)
    model = load(tmp_path, dtype=BF16)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert {name.rpartition(".")[2] for name, layer in layers.items() if layer.int4 is None} == {"down_proj"}
    [message] = warnings_of(caplog)
    assert "the layer has 96 inputs and 64 outputs, which must be multiples of 64 and 8 on a GPU" in message
