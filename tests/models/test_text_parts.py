"""The text parts of multimodal models: what is loaded of them, and that their images' weights are left alone."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralVisionConfig,
    SiglipVisionConfig,
)

from tests.engine.engines import engine
from tests.models.tiny import (
    DTYPE,
    check_logits,
    edit_config,
    hf_logits,
    load_tiny,
    prompt,
    save,
    tiny_hf_model,
)
from vllm_blend import SamplingParams
from vllm_blend.config import ModelConfig
from vllm_blend.engine.setup import fingerprint
from vllm_blend.finetune.attention import check_supported
from vllm_blend.models.loader import load_hf_config, load_model

LENGTH = 60
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PARTS = ("mistral", "ministral3", "gemma3")


def tiny_multimodal(text: str, tied: bool = True, **overrides: Any) -> Any:
    """A model with a vision tower whose text part is that of `tiny_hf_model(text)`."""
    alone = tiny_hf_model(text, tie_word_embeddings=tied, **overrides)
    common: dict[str, Any] = {"text_config": alone.config, "tie_word_embeddings": tied}
    model: Any
    if text == "gemma3":
        vision = SiglipVisionConfig(**VISION)
        model = Gemma3ForConditionalGeneration(Gemma3Config(vision_config=vision, mm_tokens_per_image=1, **common))
    else:
        model = Mistral3ForConditionalGeneration(Mistral3Config(vision_config=PixtralVisionConfig(**VISION), **common))
    # Gemma 3's softcap of logits is one of text models alone in transformers: compare with that one.
    model.model.language_model.load_state_dict(alone.model.state_dict())
    model.lm_head.load_state_dict(alone.lm_head.state_dict())
    return model.eval()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("text", PARTS)
def test_the_text_of_a_multimodal_model(
    text: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf_model = tiny_multimodal(text, tied, **({"final_logit_softcapping": None} if text == "gemma3" else {}))
    save(hf_model, tmp_path)
    with caplog.at_level(logging.INFO):
        model = load_tiny(str(tmp_path))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    check_logits(model, hf_model, LENGTH, [LENGTH - 9, 9])
    [line] = [record.getMessage() for record in caplog.records if "only the text" in record.getMessage()]
    images = [name for name in load_file(tmp_path / "model.safetensors") if "language_model" not in name]
    count = len([name for name in images if not name.startswith("lm_head")])
    assert f"{count} tensors of its other parts are not read" in line and count > 10


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_names_of_older_and_newer_checkpoints(prefix: str, tmp_path: Path) -> None:
    save(tiny_multimodal("mistral", tied=False), tmp_path)
    expected = load_tiny(str(tmp_path)).state_dict()
    path = tmp_path / "model.safetensors"
    head = "lm_head." if prefix.startswith("model.") else "language_model.lm_head."
    tensors = {}
    for name, tensor in load_file(path).items():
        for old in ("language_model.model.", "model.language_model."):
            name = prefix + name.removeprefix(old) if name.startswith(old) else name
        name = head + name.rpartition("lm_head.")[2] if "lm_head." in name else name
        tensors[name] = tensor
    assert sum(name.startswith(prefix) for name in tensors) > 20
    save_file(tensors, path, {"format": "pt"})
    loaded = load_tiny(str(tmp_path)).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_the_config_is_the_texts(tmp_path: Path) -> None:
    save(tiny_multimodal("ministral3"), tmp_path)
    edit_config(tmp_path, eos_token_id=[1, 7], quantization_config={"quant_method": "fp8"})
    config = load_hf_config(str(tmp_path), hf_overrides={"rms_norm_eps": 1e-3})
    assert config.architectures == ["Mistral3ForConditionalGeneration"] and config.model_type == "ministral3"
    assert config.vocab_size == 97 and config.rms_norm_eps == 1e-3
    assert config.eos_token_id == [1, 7] and config.quantization_config["quant_method"] == "fp8"


def test_chunk_kv_depends_on_how_queries_are_scaled(tmp_path: Path) -> None:
    directory = save(tiny_multimodal("ministral3"), tmp_path)
    digests = set()
    for beta in (0.7, 0.3):
        overrides = {"rope_parameters": {"llama_4_scaling_beta": beta}}
        config = load_hf_config(directory, hf_overrides=overrides)
        model = load_model(config, directory, DTYPE, "cpu", max_position=96)
        worker: Any = SimpleNamespace(
            model_runner=SimpleNamespace(model=model),
            hf_config=config,
            num_ranks=1,
            dtype=DTYPE,
            num_layers=3,
            shape=SimpleNamespace(kv_heads=2, head_dim=16, dtype=DTYPE),
        )
        digests.add(fingerprint(ModelConfig(directory, hf_overrides=overrides), worker, None).digest)
    assert len(digests) == 2


def test_an_unknown_multimodal_model_is_refused(tmp_path: Path) -> None:
    save(tiny_multimodal("mistral"), tmp_path)
    edit_config(tmp_path, architectures=["LlavaForConditionalGeneration"])
    with pytest.raises(ValueError, match="unsupported model architecture: 'LlavaForConditionalGeneration'"):
        load_tiny(str(tmp_path))


@pytest.mark.cpu_only
def test_an_engine_answers(tmp_path: Path) -> None:
    hf_model = tiny_multimodal("ministral3")
    ids = prompt(LENGTH)
    expected = hf_logits(hf_model.to(DTYPE), ids)[-1].argmax().item()
    with engine(save(hf_model, tmp_path), skip_tokenizer_init=True, max_model_len=96) as llm:
        [output] = llm.generate({"prompt_token_ids": ids.tolist()}, SamplingParams(max_tokens=1, temperature=0))
    assert output.outputs[0].token_ids[0] == expected


def test_the_text_part_is_not_trained(tmp_path: Path) -> None:
    save(tiny_multimodal("mistral"), tmp_path)
    with pytest.raises(ValueError, match=r"Mistral3ForConditionalGeneration .*only its text is served"):
        check_supported(load_hf_config(str(tmp_path)), "here", 96)
