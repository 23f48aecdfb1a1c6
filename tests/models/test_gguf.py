"""GGUF files: what is loaded is what transformers loads, and what the model was that the file was written from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.distributed.ranks import CPU, on_ranks
from tests.engine.engines import greedy, new_llm, run, tokens_of
from tests.engine.tiny_tokenizers import byte_level
from tests.models.gguf_files import BF16, F16, F32, Q4_0, Q8_0, TRAITS, arrays_of, gguf_model, write_gguf
from tests.models.tiny import CONTEXT, PagedRunner, hf_logits, load_tiny, prompt
from vllm_blend.layers.rope_frequencies import context_lengths
from vllm_blend.models.gguf.families import GGUF_FAMILIES
from vllm_blend.models.loader import load_hf_config, load_model

pytestmark = pytest.mark.cpu_only
LENGTH = 60
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def ours(path: str) -> torch.Tensor:
    return PagedRunner(load_tiny(path)).run(prompt(LENGTH), [LENGTH])


def as_transformers_reads(path: str) -> PreTrainedModel:
    folder, name = Path(path).parent, Path(path).name
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model.eval()
    return model


def test_every_family_is_tested() -> None:
    assert set(GGUF_FAMILIES) == {"llama", "qwen2", "qwen3", "gemma3"}


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0, Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(family: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    traits = {"head_dim": 128} if family == "qwen3" else {}  # transformers does not read it for this family
    path = write_gguf(tmp_path / "model.gguf", family, gguf_model(family, **traits), kind)
    expected = hf_logits(as_transformers_reads(path), prompt(LENGTH))
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(path), expected, rtol=1e-4, atol=2e-4)


def k_quantized(kind: str, rows: int, seed: int = 3) -> np.ndarray:
    """Rows of one block of 256 numbers each in one of llama.cpp's K types, which the package gguf cannot write: any
    bytes, but for their scales, which are small."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, size), np.uint8)
    scale = np.array([0.0004], np.float16).view(np.uint8)
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (size - 2,)}[kind]
    for place in places:
        blocks[:, place : place + 2] = scale
    return blocks


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_types_of_256_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    stored = {f"blk.{i}.ffn_down.weight": (k_quantized(kind, 64, i), kind) for i in range(3)}
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf_model("llama", intermediate_size=256), Q8_0, stored=stored)
    reference = as_transformers_reads(path)
    assert 0.01 < reference.model.layers[0].mlp.down_proj.weight.std() < 1
    torch.testing.assert_close(ours(path), hf_logits(reference, prompt(LENGTH)), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", sorted(GGUF_FAMILIES))
def test_logits_are_those_of_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    model = gguf_model(family)
    path = write_gguf(tmp_path / "model.gguf", family, model)
    torch.testing.assert_close(ours(path), hf_logits(model, prompt(LENGTH)), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_traits_of_a_model_are_in_its_config(family: str, tmp_path: Path) -> None:
    """Tied embeddings, as many KV heads as heads, and biases."""
    traits: dict[str, Any] = {"tie_word_embeddings": True, "num_key_value_heads": 4}
    if family == "llama":
        traits |= {"attention_bias": False, "mlp_bias": True}
    model = gguf_model(family, **traits)
    path = write_gguf(tmp_path / "model.gguf", family, model, metadata={"attention.head_count_kv": None})
    torch.testing.assert_close(ours(path), hf_logits(model, prompt(LENGTH)), rtol=1e-4, atol=2e-4)
    config = load_hf_config(path)
    assert config.tie_word_embeddings and config.num_key_value_heads == 4 and config.eos_token_id == 2


def with_factors(factors: np.ndarray) -> Any:
    return lambda arrays: arrays.update({"rope_freqs.weight": factors.astype(np.float32)})


def test_llama_3s_rope_is_read_from_its_factors(tmp_path: Path) -> None:
    """transformers leaves them out: what is compared is the model that the file was written from."""
    model, plain = gguf_model("llama", rope_parameters=LLAMA3), gguf_model("llama", rope_parameters=LLAMA3 | PLAIN)
    scaled, unscaled = (each.model.rotary_emb.inv_freq.double().numpy() for each in (model, plain))
    factors = unscaled / scaled
    assert factors.min() == 1 and factors.max() == pytest.approx(8)
    path = write_gguf(tmp_path / "model.gguf", "llama", model, change=with_factors(factors))
    torch.testing.assert_close(ours(path), hf_logits(model, prompt(LENGTH)), rtol=1e-4, atol=2e-4)
    assert {name: load_hf_config(path).rope_parameters[name] for name in LLAMA3} == LLAMA3
    for other in (factors * 2, factors[::-1]):
        write_gguf(tmp_path / "model.gguf", "llama", model, change=with_factors(other))
        with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs\.weight are not those of Llama 3\.1's"):
            load_hf_config(path)
    write_gguf(
        tmp_path / "model.gguf", "llama", model, change=with_factors(factors), metadata={"rope.scaling.factor": 8.0}
    )
    with pytest.raises(ValueError, match=r"llama\.rope\.scaling\.factor is 8\.0, which is not supported here"):
        load_hf_config(path)  # llama.cpp would divide by both
    write_gguf(tmp_path / "model.gguf", "llama", plain, change=with_factors(np.ones(8)))
    torch.testing.assert_close(ours(path), hf_logits(plain, prompt(LENGTH)), rtol=1e-4, atol=2e-4)


PLAIN = {"rope_type": "default"}


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"type": "none"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # llama.cpp's default
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # an old name
        ({"factor": 0.0}, {"rope_type": "default"}),
        ({"factor": 1.0, "attn_factor": 1.0}, {"rope_type": "default"}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 24},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
        ),
    ],
)
def test_other_scaling_of_rope_is_read(metadata: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    model = gguf_model("qwen2", rope_parameters=rope | {"rope_theta": 10000.0})
    stated = {f"rope.{'' if name == 'scale_linear' else 'scaling.'}{name}": each for name, each in metadata.items()}
    path = write_gguf(tmp_path / "model.gguf", "qwen2", model, metadata=stated)
    torch.testing.assert_close(ours(path), hf_logits(model, prompt(LENGTH)), rtol=1e-4, atol=2e-4)
    assert context_lengths(load_hf_config(path)) is not None


@pytest.mark.parametrize(
    ("metadata", "traits"),
    [
        ({"rope.scaling.factor": 8.0}, {"full": {"rope_type": "linear", "factor": 8.0}}),
        ({"rope.freq_base_swa": 500.0}, {"sliding": {"rope_theta": 500.0}}),
        ({"attention.sliding_window_pattern": 3}, {"layer_types": 3}),
        ({"final_logit_softcapping": 2.0}, {"final_logit_softcapping": 2.0}),
        ({"final_logit_softcapping": 0.0, "attention.scale": 0.25, "attn_logit_softcapping": 0.0}, {}),
    ],
)
def test_what_a_file_may_say_of_gemma_3_is_read(
    metadata: dict[str, Any], traits: dict[str, Any], tmp_path: Path
) -> None:
    own = dict(traits)
    if pattern := own.get("layer_types"):
        own["layer_types"] = [f"{'sliding' if (i + 1) % pattern else 'full'}_attention" for i in range(7)]
    rope = TRAITS["gemma3"]["rope_parameters"]
    own["rope_parameters"] = {
        f"{kind}_attention": rope[f"{kind}_attention"] | own.pop(kind, {}) for kind in ("full", "sliding")
    }
    model = gguf_model("gemma3", **own)
    path = write_gguf(tmp_path / "model.gguf", "gemma3", model, metadata=metadata)
    expected = hf_logits(model, prompt(LENGTH))
    torch.testing.assert_close(ours(path), expected, rtol=1e-4, atol=2e-4)
    if traits:
        plain = write_gguf(tmp_path / "plain.gguf", "gemma3", model)
        assert (ours(plain) - expected).abs().max() > 1e-2


def test_a_warning_says_that_weights_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind, stores in ((Q8_0, "gguf: Q8_0"), (Q4_0, "gguf: Q4_0"), (F16, None)):
        caplog.clear()
        path = write_gguf(tmp_path / f"{kind.name}.gguf", "qwen3", gguf_model("qwen3"), kind)
        with caplog.at_level(logging.WARNING, logger="vllm_blend"):
            load_tiny(path)
        said = [record.getMessage() for record in caplog.records if "dequantized" in record.getMessage()]
        assert (stores is None and not said) or f"({stores})" in said[0]


def test_the_models_dtype_is_that_of_the_matrices(tmp_path: Path) -> None:
    expected = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, Q8_0: torch.float16}
    for kind, dtype in expected.items():
        path = write_gguf(tmp_path / f"{kind.name}.gguf", "qwen3", gguf_model("qwen3"), kind)
        assert load_hf_config(path).dtype == dtype
        # float16 has too small a range for Gemma 3
        path = write_gguf(tmp_path / f"{kind.name}.gguf", "gemma3", gguf_model("gemma3"), kind)
        assert load_hf_config(path).dtype == (torch.bfloat16 if dtype == torch.float16 else dtype)


@pytest.mark.parametrize(("kind", "dtype"), [(BF16, torch.bfloat16), (F16, torch.float16), (Q8_0, torch.float16)])
def test_one_matrix_in_float32_changes_no_dtype(
    kind: gguf.GGMLQuantizationType, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, name = gguf_model("qwen3"), "token_embd.weight"
    stored = {name: (arrays_of("qwen3", model)[name], "F32")}
    path = write_gguf(tmp_path / "model.gguf", "qwen3", model, kind, stored=stored)
    assert load_hf_config(path).dtype == dtype


def test_ranks_have_their_shares(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", gguf_model("llama"), Q8_0)

    def logits(ranks: Any) -> torch.Tensor:
        model = load_model(load_hf_config(path), path, torch.float32, CPU, max_position=CONTEXT, ranks=ranks)
        return PagedRunner(model).run(prompt(LENGTH), [LENGTH])

    [expected] = on_ranks(1, logits)
    shared, _ = on_ranks(2, logits)
    torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-4)


def test_an_engine_answers_as_with_the_same_model_in_safetensors(tmp_path: Path) -> None:
    tokenizer = byte_level()
    model = gguf_model("qwen2", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", "qwen2", model)
    asked = [{"prompt_token_ids": [(7 * i + start) % len(tokenizer) for i in range(30)]} for start in range(4)]
    blend: dict[str, Any] = {"prefix": "Read.", "chunks": ["One two three.", "Four five."], "suffix": "What?"}
    arguments = {"num_gpu_blocks_override": 64, "enable_blending": True, "blend_recompute_ratio": 1.0}
    answers, digests = [], []
    for name in (str(tmp_path / "folder"), path):
        with new_llm(name, tokenizer=str(tmp_path / "folder"), **arguments) as llm:
            answers.append(tokens_of(run(llm, [*asked, blend], greedy(8))))
            digests.append(llm.llm_engine.fingerprint)
    assert answers[0] == answers[1]
    assert digests[1].model == "" and digests[0].weights != digests[1].weights
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(Path(path).read_bytes())
    other = write_gguf(tmp_path / "other.gguf", "qwen2", gguf_model("qwen2", vocab_size=len(tokenizer), seed=1))
    found = []
    for name in (str(moved), other):
        with new_llm(name, skip_tokenizer_init=True, num_gpu_blocks_override=64) as llm:
            found.append(llm.llm_engine.fingerprint.weights)
    assert found[1] != digests[1].weights  # of other content
    with pytest.raises(ValueError, match=r"other\.gguf' is a GGUF file, whose tokenizer is not read: give tokenizer="):
        new_llm(other)
