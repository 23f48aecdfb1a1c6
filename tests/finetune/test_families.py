"""Every family that can be trained: its logits, and that what is saved is what the engine serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.compare import assert_logprobs_match
from tests.engine.engines import greedy, hf_model, new_llm, run
from tests.engine.tiny_tokenizers import byte_level
from tests.finetune.test_loop import batch_of
from tests.models.tiny import save, tiny_hf_model
from vllm_blend.finetune import attention
from vllm_blend.finetune.attention import MODEL_TYPES
from vllm_blend.finetune.command import main
from vllm_blend.finetune.loop import hidden_states
from vllm_blend.finetune.teacher import FrozenModel

pytestmark = pytest.mark.cpu_only

SAMPLE = {"ctxs": [{"title": "", "text": "a b"}, {"title": "", "text": "c"}], "question": "who", "answers": ["x"]}
PROMPT = {"prompt_token_ids": list(range(5, 35))}


def tiny(model_type: str, folder: Path) -> str:
    """A model with room for the tokens that Qwen's tokenizers add to any."""
    overrides: dict[str, Any] = {"partial_rotary_factor": 1.0} if model_type == "phi3" else {}
    byte_level().save_pretrained(folder)
    return save(tiny_hf_model(model_type, max_position_embeddings=512, vocab_size=448, **overrides), folder)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_loss_sees_the_models_logits(model_type: str, tmp_path: Path) -> None:
    attention.register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        tiny(model_type, tmp_path), dtype=torch.float32, attn_implementation=attention.NAME
    ).eval()
    batch = batch_of(3)
    with torch.no_grad():
        expected = model(input_ids=batch.ids, use_cache=False).logits
        own = model.get_output_embeddings()(hidden_states(model, batch, None))
        teacher = FrozenModel(model)
        taught = teacher.head(teacher.hidden(batch))
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(taught, expected)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_is_saved_is_served(model_type: str, rank: int, tmp_path: Path) -> None:
    model, data, output = tiny(model_type, tmp_path / "old"), tmp_path / "musique_x.json", tmp_path / "new"
    data.write_text(json.dumps([SAMPLE]))
    options: list[Any] = [model, "--output", output, "--dataset", data, "--device", "cpu", "--lora-rank", rank]
    options += ["--steps", 2, "--batch-size", 2, "--learning-rate", 0.02, "--warmup-steps", 0]
    assert main([str(option) for option in options]) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, output))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if ".self_attn." in name and name.endswith("_proj.weight")} <= changed
    [answer] = run(new_llm(str(output)), [PROMPT], greedy(4, logprobs=3, ignore_eos=True))
    assert_logprobs_match(answer, hf_model(str(output)))
