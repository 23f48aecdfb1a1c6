"""GGUF files: what is loaded is what transformers loads, and what the model was that the file was written from."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from tests.checkout import ROOT
from tests.distributed.ranks import CPU, on_ranks
from tests.engine.engines import greedy, new_llm, run, tokens_of
from tests.engine.tiny_tokenizers import byte_level
from tests.models.gguf_files import BF16, F16, F32, Q4_0, Q8_0, TRAITS, arrays_of, gguf_model, write_gguf
from tests.models.gguf_vocabularies import TEXTS, byte_level_entries, entries_of, write_vocabulary
from tests.models.tiny import CONTEXT, PagedRunner, hf_logits, load_tiny, prompt
from vllm_blend.layers.rope_frequencies import context_lengths
from vllm_blend.models.gguf.families import GGUF_FAMILIES
from vllm_blend.models.gguf.header import read_header
from vllm_blend.models.gguf.names import conversion
from vllm_blend.models.gguf.tokenizer import load_gguf_tokenizer
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


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0, Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(family: str, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    traits = {"head_dim": 128} if family == "qwen3" else {}  # transformers does not read it for this family
    path = write_gguf(tmp_path / "model.gguf", family, gguf_model(family, **traits), kind)
    expected = hf_logits(as_transformers_reads(path), prompt(LENGTH))
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(path), expected, rtol=1e-4, atol=2e-4)


def test_a_file_can_be_converted_as_errors_and_docs_say(tmp_path: Path) -> None:
    vocabulary = byte_level_entries("llama-bpe", **{"ggml.add_bos_token": True})
    model = gguf_model("llama", vocab_size=len(vocabulary["/tokenizer.ggml.tokens"]))
    path = Path(write_gguf(tmp_path / "model.gguf", "llama", model, Q8_0, vocabulary=vocabulary))
    known = {"AutoModelForCausalLM": AutoModelForCausalLM, "GgufConfig": GgufConfig, "new_path": tmp_path / "error"}
    eval(conversion(repr(str(path.parent)), repr(path.name)), known)
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(block, {"path": path.parent, "name": path.name, "new_path": tmp_path / "docs"})
    expected = ours(str(path))
    for name in ("error", "docs"):
        torch.testing.assert_close(ours(str(tmp_path / name)), expected, rtol=1e-4, atol=2e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "docs")
    assert tokenizer.encode(TEXTS[0]) == load_gguf_tokenizer(path).encode(TEXTS[0])


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = Path(write_gguf(tmp_path / "model.gguf", "llama", gguf_model("llama")))
    first = read_header(path)
    assert read_header(path) is first  # a vocabulary takes a while to pass over
    write_gguf(path, "llama", gguf_model("llama", num_hidden_layers=2))
    assert len(read_header(path).tensors) < len(first.tensors)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_header(path)


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


@pytest.mark.parametrize("family", [*sorted(GGUF_FAMILIES), "mixtral"])
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


def adding(more: dict[str, np.ndarray]) -> Any:
    return lambda arrays: arrays.update(more)


def with_factors(factors: np.ndarray) -> Any:
    return adding({"rope_freqs.weight": factors.astype(np.float32)})


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


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 4 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 24,
}


def test_phi_3s_rope_and_window_are_read(tmp_path: Path) -> None:
    """transformers leaves both out: what is compared is the model that the file was written from."""
    traits = {"rope_parameters": LONG, "original_max_position_embeddings": 24, "sliding_window": None}
    model = gguf_model("phi3", **traits)
    factors = {
        f"rope_factors_{kind}.weight": np.array(LONG[f"{kind}_factor"], np.float32) for kind in ("short", "long")
    }
    stated = {
        "rope.scaling.original_context_length": 24,
        "rope.scaling.attn_factor": float(model.model.rotary_emb.attention_scaling),
        "attention.sliding_window": 0,  # Phi-4's
    }
    path = write_gguf(tmp_path / "model.gguf", "phi3", model, change=adding(factors), metadata=stated)
    torch.testing.assert_close(ours(path), hf_logits(model, prompt(LENGTH)), rtol=1e-4, atol=2e-4)
    assert context_lengths(load_hf_config(path)) == (24, CONTEXT)
    for change, metadata, message in (
        ({}, {"rope.scaling.attn_factor": 1.5}, r"phi3\.rope\.scaling\.attn_factor is 1\.5"),
        ({"rope_factors_long.weight": np.ones(4, np.float32)}, {}, r"rope_factors_long\.weight is of the shape \(4,\)"),
    ):
        write_gguf(Path(path), "phi3", model, change=adding(factors | change), metadata=stated | metadata)
        with pytest.raises(ValueError, match=rf"model\.gguf: {message}"):
            load_hf_config(path)


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss"])
def test_ranks_read_their_shares_of_stacked_experts(family: str, tmp_path: Path) -> None:
    model = gguf_model(family, **({"moe_intermediate_size": 64} if family == "qwen3moe" else {}))
    path = write_gguf(tmp_path / "model.gguf", family, model, Q8_0)

    def logits(ranks: Any) -> torch.Tensor:
        model = load_model(load_hf_config(path), path, torch.float32, CPU, max_position=CONTEXT, ranks=ranks)
        return PagedRunner(model).run(prompt(LENGTH), [LENGTH])

    [expected] = on_ranks(1, logits)
    shared, _ = on_ranks(2, logits)
    torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-4)


def test_mistral_small_scales_no_queries(tmp_path: Path) -> None:
    """The same architecture without what Ministral 3 has."""
    model = gguf_model("mistral")
    path = write_gguf(tmp_path / "model.gguf", "mistral3", model)
    torch.testing.assert_close(ours(path), hf_logits(model, prompt(LENGTH)), rtol=1e-4, atol=2e-4)
    assert load_hf_config(path).architectures == ["MistralForCausalLM"]


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


def test_an_engine_needs_the_file_alone(tmp_path: Path) -> None:
    """It answers as with the same model and tokenizer in a folder: prompts, a blend, and a chat."""
    tokenizer = byte_level()
    entries = entries_of(tokenizer, "gpt-2", chat_template="{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
    model = gguf_model("qwen2", vocab_size=len(tokenizer))
    folder = tmp_path / "folder"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(entries["/tokenizer.chat_template"])
    path = write_gguf(tmp_path / "model-00001-of-00003.gguf", "qwen2", model, vocabulary=entries, parts=3)
    asked = [{"prompt_token_ids": [(7 * i + start) % len(tokenizer) for i in range(30)]} for start in range(3)]
    blend: dict[str, Any] = {"prefix": "Read.", "chunks": ["One two three.", "Four five."], "suffix": "What?"}
    prompts = ["The quick brown fox", "<s>naïve café</s> 😀", *asked, blend]
    arguments = {"num_gpu_blocks_override": 64, "enable_blending": True, "blend_recompute_ratio": 1.0}
    answers, digests = [], []
    for name in (str(folder), path):
        with new_llm(name, **arguments) as llm:
            chat = llm.chat([{"role": "user", "content": "Where did the dog go?"}], greedy(8), use_tqdm=False)
            answers.append([*tokens_of(run(llm, prompts, greedy(8))), *tokens_of(chat), chat[0].prompt])
            digests.append(llm.llm_engine.fingerprint)
    assert answers[0] == answers[1] and answers[0][-1] == "<s>Where did the dog go?</s>"
    assert digests[1].model == "" and digests[0].weights != digests[1].weights
    last = tmp_path / "model-00003-of-00003.gguf"
    content = bytearray(last.read_bytes())
    content[-1] ^= 1  # a bit of the last weight
    last.write_bytes(content)
    with new_llm(path, skip_tokenizer_init=True, num_gpu_blocks_override=64) as llm:
        assert llm.llm_engine.fingerprint.weights != digests[1].weights


def test_parts_that_are_missing_or_wrong_are_named(tmp_path: Path) -> None:
    model = gguf_model("qwen2")
    path = write_gguf(tmp_path / "model-00001-of-00003.gguf", "qwen2", model, parts=3)
    torch.testing.assert_close(ours(path), hf_logits(model, prompt(LENGTH)), rtol=1e-4, atol=2e-4)
    second, third = (Path(path.replace("00001-of", f"0000{number}-of")) for number in (2, 3))
    with pytest.raises(
        ValueError, match=r"00002-of-00003\.gguf is not the first part of its file: give '.*00001-of-00003"
    ):
        load_hf_config(str(second))
    renamed = tmp_path / "model.gguf"
    renamed.write_bytes(Path(path).read_bytes())
    with pytest.raises(
        ValueError, match=r"model\.gguf is one of 3 parts .*must end with -00001-of-00003\.gguf: give the"
    ):
        load_hf_config(str(renamed))
    content = third.read_bytes()
    third.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=r"00003-of-00003\.gguf is not part 3 of model-00001-of-00003\.gguf: fetch"):
        load_hf_config(path)
    third.unlink()
    with pytest.raises(FileNotFoundError, match=r"00003-of-00003\.gguf' does not exist"):
        load_hf_config(path)
    third.write_bytes(content[:-40])
    with pytest.raises(ValueError, match=r"00003-of-00003\.gguf is damaged"):
        load_hf_config(path)


def test_a_tokenizer_may_be_another_files(tmp_path: Path) -> None:
    tokenizer = byte_level()
    model = gguf_model("qwen2", vocab_size=len(tokenizer))
    path = write_gguf(tmp_path / "model.gguf", "qwen2", model)
    with pytest.raises(
        ValueError, match=r"the tokenizer of .*model\.gguf cannot be read: .*model=None.*give tokenizer="
    ):
        new_llm(path)
    other = write_vocabulary(tmp_path / "other.gguf", entries_of(tokenizer, "gpt-2"))
    with new_llm(path, tokenizer=str(other), num_gpu_blocks_override=32) as llm:
        assert llm.get_tokenizer().encode("naïve 😀") == tokenizer.encode("naïve 😀")
