"""An adapter is trained alone, and the model that is saved has it in its weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.engines import engine, greedy, run, tiny_model
from vllm_blend.finetune import attention
from vllm_blend.finetune.command import main
from vllm_blend.finetune.lora import Adapter, check_lora
from vllm_blend.finetune.rows import make_row, pad_rows, row_batch
from vllm_blend.finetune.run import Student
from vllm_blend.finetune.teacher import WithoutAdapter
from vllm_blend.pipeline.datasets import normalize_sample
from vllm_blend.pipeline.prompts import build_qa_prompt

pytestmark = pytest.mark.cpu_only

SAMPLE = {"ctxs": [{"title": "", "text": "a b"}, {"title": "", "text": "c"}], "question": "who", "answers": ["x"]}


def test_a_trained_adapter_is_merged_into_the_model_that_is_saved(tmp_path: Path) -> None:
    model, data = tiny_model("mistral", max_position_embeddings=512), tmp_path / "musique_x.json"
    data.write_text(json.dumps([SAMPLE]))
    output = tmp_path / "new"
    options: list[Any] = [model, "--output", output, "--dataset", data, "--device", "cpu", "--lora-rank", 8]
    options += ["--steps", 40, "--batch-size", 4, "--learning-rate", 0.02, "--warmup-steps", 5, "--distill", 0.01]
    assert main([str(option) for option in options]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, output))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    with engine(str(output), enable_blending=True, blend_selector="none") as llm:
        [answer] = run(llm, build_qa_prompt(normalize_sample(SAMPLE), "musique"), greedy(4, stop="\n"))
    assert answer.outputs[0].text.strip() == "x"


def test_saved_weights_compute_what_the_adapter_does_and_the_teacher_is_without_it(tmp_path: Path) -> None:
    attention.register()
    directory, ids = tiny_model("llama"), torch.arange(24)[None]
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention.NAME
    )
    row = make_row("", [], [("q" * 23, "a")], lambda text: list(text.encode()), None, 24)
    assert row is not None
    numbers = pad_rows([row], 24, 0)
    batch = row_batch(*(torch.from_numpy(array) for array in (numbers.ids, numbers.weights, numbers.chunks)))
    with torch.no_grad():
        untouched = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    adapter = Adapter(model, rank=4, alpha=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == (".lora_" in name)
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
        adapted = model(input_ids=ids).logits
    assert torch.allclose(WithoutAdapter(model, adapter).hidden(batch), untouched, atol=1e-5)
    merged_weights, layer = adapter.merged_weights(), model.model.layers[0].self_attn.q_proj
    product = layer.lora_B.default.weight @ layer.lora_A.default.weight
    expected = layer.base_layer.weight + 8 / 4 * product  # alpha / rank
    assert torch.allclose(merged_weights["model.layers.0.self_attn.q_proj.weight"], expected, atol=1e-6)
    Student(model, _Tokenizer(), torch.float32, adapter).save(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, adapted, atol=1e-3)


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


def test_an_adapter_without_peft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_lora(0, 32)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_lora(0, 32)
    with pytest.raises(ValueError, match=r"--lora-rank 8 needs the peft library: pip install vllm-blend\[finetune\]"):
        check_lora(8, 32)
    with pytest.raises(ValueError, match="--lora-alpha is 0"):
        check_lora(8, 0)
