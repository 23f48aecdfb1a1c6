"""Models whose GGUF file stays in blocks compute what the dequantized ones do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.gguf_files import F16, Q4_0, Q8_0, gguf_model, write_gguf
from tests.models.loading import needs_peak, peak_of_loading
from tests.models.test_gguf import k_quantized
from tests.models.tiny import CONTEXT, PagedRunner, prompt
from vllm_blend.layers.embedding import Embedding, LMHead
from vllm_blend.layers.experts import Experts
from vllm_blend.layers.linear import Linear
from vllm_blend.models.loader import load_hf_config, load_model
from vllm_blend.ops import bindings
from vllm_blend.ops.blocks import KERNEL_ROWS
from vllm_blend.quality.probe import Probe

pytestmark = pytest.mark.cpu_only
CPU = torch.device("cpu")
LENGTH = KERNEL_ROWS + 10


def load(path: str, keeps: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(load_hf_config(path), path, dtype, CPU, max_position=CONTEXT, keeps_int4=keeps)


def logits(model: Any) -> torch.Tensor:
    """Return those of many rows at once, and of a few after them."""
    return PagedRunner(model).run(prompt(LENGTH), [LENGTH - 3, 1, 2])


def quantized_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Linear | Embedding | LMHead)]


@pytest.mark.parametrize("kind", [Q8_0, Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("gemma3", True), ("phi3", False)])
def test_logits_are_those_of_the_dequantized_model(family: str, tied: bool, kind: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", family, gguf_model(family, tie_word_embeddings=tied), kind)
    kept, dequantized = load(path), load(path, keeps=False)
    probes = [Probe(kept), Probe(dequantized)]
    expected = logits(dequantized)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(kept), expected, rtol=1e-4, atol=2e-4)
    assert all(layer.blocks is not None and layer.weight.numel() == 0 for layer in quantized_layers(kept))
    assert all(layer.blocks is None for layer in quantized_layers(dequantized))
    assert probes[0].token_layers == pytest.approx(probes[1].token_layers) and probes[0].token_layers > 0
    if tied:
        assert kept.lm_head.blocks is kept.model.embed_tokens.blocks


def test_types_may_differ_within_a_layer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Types of 256 inputs, two types in one product, and a matrix that is not quantized beside one that is."""
    names = {"blk.0.attn_q.weight": "Q4_K", "blk.1.attn_k.weight": "Q6_K", "blk.2.attn_v.weight": "Q5_K"}
    model = gguf_model("llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=16)
    stored: dict[str, Any] = {name: (k_quantized(kind, 64), kind) for name, kind in names.items()}
    path = write_gguf(tmp_path / "model.gguf", "llama", model, Q8_0, stored=stored)
    with caplog.at_level(logging.INFO):
        kept = load(path)
    assert any("stay in the blocks of the file" in record.getMessage() for record in caplog.records)
    kinds = [[part.kind for part in layer.self_attn.qkv_proj.blocks.parts] for layer in kept.model.layers]
    assert kinds == [[12, 8], [8, 14, 8], [8, 13]]
    torch.testing.assert_close(logits(kept), logits(load(path, keeps=False)), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", [Q8_0, Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["qwen3moe", "mixtral", "gpt-oss"])
def test_experts_stay_in_blocks(family: str, kind: Any, tmp_path: Path) -> None:
    model = gguf_model(family, **({"moe_intermediate_size": 64} if family == "qwen3moe" else {}))
    path = write_gguf(tmp_path / "model.gguf", family, model, kind)
    kept, dequantized = load(path), load(path, keeps=False)
    expected = logits(dequantized)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(kept), expected, rtol=1e-4, atol=2e-4)
    experts = [module for module in kept.modules() if isinstance(module, Experts)]
    assert experts and all(each.gate_up.numel() == each.down.numel() == 0 for each in experts)
    before = [module for module in dequantized.modules() if isinstance(module, Experts)]
    assert all(each.gate_up_blocks is None is each.down_blocks for each in before)
    for own, whole in zip(experts, before, strict=True):
        assert own.gate_up_blocks is not None and len(own.gate_up_blocks) == len(whole.gate_up)
        assert own.num_weights == whole.num_weights == whole.gate_up.numel() + whole.down.numel()


def test_experts_of_which_not_all_have_a_kernel_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`down` has rows that are not made of blocks of 256, `gate` and `up` are of two types."""
    model = gguf_model("qwen3moe", hidden_size=256, moe_intermediate_size=64, num_attention_heads=4, head_dim=64)
    experts = model.config.num_experts
    stored: dict[str, Any] = {
        "blk.0.ffn_gate_exps.weight": (k_quantized("Q4_K", experts * 64).reshape(experts, 64, -1), "Q4_K"),
        "blk.1.ffn_down_exps.weight": (np.zeros((experts, 256, 64), np.float32), "F32"),
    }
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", model, Q8_0, stored=stored)
    with caplog.at_level(logging.WARNING):
        kept = load(path)
    first, second, *_ = [module for module in kept.modules() if isinstance(module, Experts)]
    assert first.gate_up_blocks is not None and first.down_blocks is not None
    assert [part.kind for part in first.gate_up_blocks[0].parts] == [12, 8]
    assert second.gate_up_blocks is not None and second.down_blocks is None and second.down.numel() > 0
    assert "dequantized" not in caplog.text  # what is in float32 was never quantized
    torch.testing.assert_close(logits(kept), logits(load(path, keeps=False)), rtol=1e-4, atol=2e-4)


@needs_peak
def test_loading_a_mixture_takes_little_more_than_its_file(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 24, "num_hidden_layers": 2}
    path = Path(write_gguf(tmp_path / "model.gguf", "qwen3moe", gguf_model("qwen3moe", **sizes), Q4_0))
    size, peak = path.stat().st_size, peak_of_loading(path, 1 << 27)
    assert 20 << 20 < size < peak < 1.3 * size + (8 << 20)  # in float32 it would be seven times the file


def test_what_has_no_kernel_is_dequantized_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gguf_model("qwen3moe", moe_intermediate_size=64)
    blocks = np.random.default_rng(0).integers(0, 256, (model.config.num_experts, 64, 2, 17), np.uint8)
    blocks[..., 0] = 122  # the exponent of a block
    stored: dict[str, Any] = {"blk.0.ffn_down_exps.weight": (blocks.reshape(len(blocks), 64, -1), "MXFP4")}
    path = write_gguf(tmp_path / "model.gguf", "qwen3moe", model, Q8_0, stored=stored)
    with caplog.at_level(logging.WARNING):
        kept = load(path)
    [said] = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert "experts.0.down_proj.weight" in said and "of the quantized types Q4_0, Q4_1" in said
    torch.testing.assert_close(logits(kept), logits(load(path, keeps=False)), rtol=1e-4, atol=2e-4)
    caplog.clear()
    monkeypatch.setattr(bindings, "_kernels_or_none", lambda: None)
    with caplog.at_level(logging.WARNING):
        model = load(path)
    assert all(layer.blocks is None for layer in quantized_layers(model))
    assert any("as the compiled CPU kernels are not there" in record.getMessage() for record in caplog.records)


def test_files_without_quantized_matrices_are_loaded_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf_model("llama"), F16)
    with caplog.at_level(logging.INFO):
        assert all(layer.blocks is None for layer in quantized_layers(load(path)))
    assert not [record for record in caplog.records if "blocks" in record.getMessage()]
