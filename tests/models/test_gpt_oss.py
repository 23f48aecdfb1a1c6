"""gpt-oss: its sinks, and its checkpoints with experts in MXFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests import tolerances
from tests.distributed.ranks import CPU, on_ranks
from tests.engine.compare import assert_logprobs_match
from tests.engine.engines import BLOCK_SIZE, engine, greedy, hf_model, run, tiny_model
from tests.features.spec_decode.engines import speculating
from tests.models.test_parity import assert_visible
from tests.models.tiny import (
    CONTEXT,
    PagedRunner,
    check_logits,
    edit_config,
    hf_logits,
    load_tiny,
    prompt,
    save,
    tiny_hf_model,
)
from vllm_blend.models.loader import load_hf_config, load_model
from vllm_blend.models.weight_formats.mxfp4 import MXFP4

LENGTH = 60
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # multiples of 32, the numbers that share a scale


def quantized(folder: Path) -> Any:
    """Write a checkpoint whose experts are MXFP4, as those of gpt-oss are. Returns transformers' model of the same
    numbers."""
    model = tiny_hf_model("gpt_oss", **WIDE)
    save(model, folder)
    path = folder / "model.safetensors"
    random = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=random, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, path, {"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def test_sinks_change_the_logits() -> None:
    plain = tiny_hf_model("gpt_oss")
    without = tiny_hf_model("gpt_oss")
    with torch.no_grad():
        for name, parameter in without.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-1e4)
    assert_visible(hf_logits(plain, prompt(LENGTH)), hf_logits(without, prompt(LENGTH)))


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    hf_model = quantized(tmp_path)
    check_logits(load_tiny(str(tmp_path)), hf_model, LENGTH, [LENGTH - 9, 9])


@pytest.mark.cpu_only
def test_ranks_share_experts_in_mxfp4(tmp_path: Path) -> None:
    expected = hf_logits(quantized(tmp_path), prompt(LENGTH))

    def logits(ranks: Any) -> torch.Tensor:
        config = load_hf_config(str(tmp_path))
        model = load_model(config, str(tmp_path), torch.float32, CPU, max_position=CONTEXT, ranks=ranks)
        return PagedRunner(model).run(prompt(LENGTH), [LENGTH])

    shared, _ = on_ranks(2, logits)
    tolerances.check("logits", shared - expected)


def test_one_expert_is_dequantized_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized(tmp_path)
    sizes = []
    dequantize = MXFP4.dequantize

    def recorded(self: Any, parts: Any) -> torch.Tensor:
        sizes.append(len(parts["_blocks"]))
        return dequantize(self, parts)

    monkeypatch.setattr(MXFP4, "dequantize", recorded)
    load_tiny(str(tmp_path))
    assert sizes == [1] * (3 * 2 * 4)


def alike() -> list[dict[str, list[int]]]:
    """Prompts with a common beginning, longer than the window."""
    ids = prompt(40).tolist()
    return [{"prompt_token_ids": [*ids, *prompt(4, seed).tolist()]} for seed in range(2, 5)]


@pytest.mark.cpu_only
def test_cascade_attention_leaves_layers_with_sinks_alone() -> None:
    with engine(tiny_model("gpt_oss"), block_size=BLOCK_SIZE, cascade_attention=True) as llm:
        for output in run(llm, alike(), greedy(8, logprobs=3, ignore_eos=True)):
            assert_logprobs_match(output, hf_model(tiny_model("gpt_oss")))


@pytest.mark.cpu_only
def test_drafts_are_verified_with_sinks() -> None:
    with speculating(tiny_model("gpt_oss"), "ngram", 3) as llm:
        for output in run(llm, alike(), greedy(8, logprobs=3, ignore_eos=True)):
            assert_logprobs_match(output, hf_model(tiny_model("gpt_oss")))


@pytest.mark.cpu_only
@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_backends_that_take_sinks(backend: str) -> None:
    directory = tiny_model("gpt_oss")
    with engine(directory, block_size=BLOCK_SIZE, attention_backend=backend) as llm:
        [output] = run(llm, [{"prompt_token_ids": prompt(40).tolist()}], greedy(8, logprobs=3, ignore_eos=True))
        assert_logprobs_match(output, hf_model(directory))
