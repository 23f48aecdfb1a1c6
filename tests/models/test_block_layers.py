"""Models whose GGUF file stays in blocks compute what the dequantized ones do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.gguf_files import F16, Q4_0, Q8_0, gguf_model, write_gguf
from tests.models.test_gguf import k_quantized
from tests.models.tiny import CONTEXT, PagedRunner, prompt
from vllm_blend.layers.embedding import Embedding, LMHead
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


def test_what_has_no_kernel_is_dequantized_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = write_gguf(tmp_path / "moe.gguf", "qwen3moe", gguf_model("qwen3moe", moe_intermediate_size=64), Q8_0)
    with caplog.at_level(logging.WARNING):
        kept = load(moe)
    [said] = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
    assert "experts" in said
    torch.testing.assert_close(logits(kept), logits(load(moe, keeps=False)), rtol=1e-4, atol=2e-4)
    caplog.clear()
    monkeypatch.setattr(bindings, "_kernels_or_none", lambda: None)
    with caplog.at_level(logging.WARNING):
        model = load(moe)
    assert all(layer.blocks is None for layer in quantized_layers(model))
    assert any("as the compiled CPU kernels are not there" in record.getMessage() for record in caplog.records)


def test_files_without_quantized_matrices_are_loaded_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf_model("llama"), F16)
    with caplog.at_level(logging.INFO):
        assert all(layer.blocks is None for layer in quantized_layers(load(path)))
    assert not [record for record in caplog.records if "blocks" in record.getMessage()]
