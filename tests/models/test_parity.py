"""Logits against Hugging Face's own models, through a paged cache with shuffled blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MinistralConfig, MinistralForCausalLM

from tests import tolerances
from tests.models.tiny import (
    ARCHITECTURES,
    CONTEXT,
    FAMILIES,
    HEAD_DIM,
    PagedRunner,
    check_logits,
    edit_config,
    hf_logits,
    load_tiny,
    prompt,
    save,
    tiny_hf_model,
)

LENGTH = 70
LAYER_TYPES = ("full_attention", "sliding_attention")
SCHEDULES = {
    "whole prompt": [LENGTH],
    "chunks": [1, 17, 32, 3, 17],
    "prompt, then token by token": [LENGTH - 20] + [1] * 20,
}
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "mscale": 1.0,
        "mscale_all_dim": 0.4,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "attention_factor": 1.3,
    },
}
# One divisor a pair, long enough for heads of any size here.
_SHORT, _LONG = ([1 + step * i for i in range(HEAD_DIM // 2)] for step in (0.05, 0.4))
ROPE["longrope"] = {
    "rope_type": "longrope",
    "short_factor": _SHORT,
    "long_factor": _LONG,
    "original_max_position_embeddings": 24,
}
ROPE["longrope-attention-factor"] = ROPE["longrope"] | {"attention_factor": 1.3}


def check_parity(hf_model: Any, directory: Path, max_position: int = CONTEXT, length: int = LENGTH) -> torch.Tensor:
    """Compare all schedules with Hugging Face's logits and return those."""
    model = load_tiny(str(directory), max_position)
    schedules = ([*chunks[:-1], length - sum(chunks[:-1])] for chunks in SCHEDULES.values())
    return check_logits(model, hf_model, length, *schedules)


def assert_visible(one: torch.Tensor, other: torch.Tensor) -> None:
    """Two models differ by so much that a comparison with the wrong one would fail."""
    assert (one - other).square().mean().sqrt() > 1.25 * tolerances.tolerance().logits.rms  # rounding takes up to 0.2
    assert (one - other).abs().max() > 1e-2


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_and_rope_type(architecture: str, rope: str, tmp_path: Path) -> None:
    parameters = {"rope_theta": 10000.0} | ROPE[rope]
    hf_model = tiny_hf_model(architecture, rope_parameters=parameters)
    save(hf_model, tmp_path)
    check_parity(hf_model, tmp_path)


@pytest.mark.parametrize("rope", [name for name in ROPE if name not in ("default", "dynamic")])
def test_each_rope_type_changes_the_logits(rope: str) -> None:
    # The comparison above could not see a type that is read but not applied, if the types hardly differed.
    ids = prompt(LENGTH)
    plain = hf_logits(tiny_hf_model("llama", rope_parameters={"rope_theta": 10000.0} | ROPE["default"]), ids)
    scaled = hf_logits(tiny_hf_model("llama", rope_parameters={"rope_theta": 10000.0} | ROPE[rope]), ids)
    assert_visible(plain, scaled)


def test_dynamic_rope_beyond_the_original_context_uses_the_base_of_max_position(tmp_path: Path) -> None:
    parameters = {"rope_theta": 10000.0} | ROPE["dynamic"]
    hf_model = tiny_hf_model("llama", rope_parameters=parameters, max_position_embeddings=40)
    save(hf_model, tmp_path)
    stretched = check_parity(
        hf_model, tmp_path, max_position=LENGTH
    )  # Hugging Face scales to the prompt: the same here
    within = PagedRunner(load_tiny(str(tmp_path), 40)).run(prompt(40), [40])
    assert_visible(within, stretched[:40])


# Fields that take a family's trait away: Hugging Face's logits must change by more than a comparison allows.
WITHOUT_TRAIT: dict[str, list[dict[str, Any]]] = {
    "gemma3": [
        {"layer_types": ["full_attention"] * 3},
        {"query_pre_attn_scalar": HEAD_DIM},
        {"final_logit_softcapping": None},
        {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in LAYER_TYPES}},
    ],
    "gpt_oss": [
        {"layer_types": ["full_attention"] * 3},
        {"swiglu_limit": 7.0},
        {"swiglu_alpha": 1.0},
        {"num_experts_per_tok": 1},
    ],
    "granite": [
        {"attention_multiplier": HEAD_DIM**-0.5},
        {"embedding_multiplier": 1.0},
        {"residual_multiplier": 1.0},
        {"logits_scaling": 1.0},
    ],
    "ministral3": [{"rope_parameters": {**ROPE["yarn"], "rope_theta": 1e4, "llama_4_scaling_beta": 0.0}}],
    "mixtral": [{"num_experts_per_tok": 1}],
    "olmo2": [],
    "phi3": [{"partial_rotary_factor": 1.0}],
    "qwen3_moe": [{"num_experts_per_tok": 1}, {"norm_topk_prob": True}],
    "smollm3": [{"no_rope_layers": [1, 1, 1]}],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_their_traits(family: str, tmp_path: Path) -> None:
    hf_model = tiny_hf_model(family)
    save(hf_model, tmp_path)
    expected = check_parity(hf_model, tmp_path)
    for fields in WITHOUT_TRAIT[family]:
        assert_visible(expected, hf_logits(tiny_hf_model(family, **fields), prompt(LENGTH)))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("mixtral", {"sliding_window": 12}),
        ("phi3", {"sliding_window": 12}),
        (
            "phi3",  # whose check takes hidden_size / heads for the size of a head
            {
                "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0} | ROPE["longrope"],
                "hidden_size": 4 * HEAD_DIM,
            },
        ),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 12}),
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("smollm3", {"no_rope_layers": [0, 0, 0], "tie_word_embeddings": True}),
        ("olmo2", {"attention_bias": True}),
    ],
)
def test_options_of_families(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    hf_model = tiny_hf_model(family, **overrides)
    save(hf_model, tmp_path)
    check_parity(hf_model, tmp_path)


V4_ROPE = {
    "default": None,
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "llama3": ROPE["llama3"],
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
}


@pytest.mark.parametrize("rope", V4_ROPE)
def test_config_json_in_the_style_of_transformers_4(rope: str, tmp_path: Path) -> None:
    hf_model = tiny_hf_model("llama", rope_parameters={"rope_theta": 5000.0} | ROPE[rope])
    save(hf_model, tmp_path)
    edit_config(
        tmp_path, ["rope_parameters", "dtype"], rope_theta=5000.0, rope_scaling=V4_ROPE[rope], torch_dtype="float32"
    )
    check_parity(hf_model, tmp_path)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_query_heads_per_kv_head(architecture: str, kv_heads: int, tmp_path: Path) -> None:
    hf_model = tiny_hf_model(architecture, num_key_value_heads=kv_heads)
    save(hf_model, tmp_path)
    check_parity(hf_model, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tied_embeddings(architecture: str, tmp_path: Path) -> None:
    hf_model = tiny_hf_model(architecture, tie_word_embeddings=True)
    save(hf_model, tmp_path)
    check_parity(hf_model, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_biases(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    hf_model = tiny_hf_model(architecture, **overrides)
    save(hf_model, tmp_path)
    check_parity(hf_model, tmp_path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_head_dim_from_hidden_size(architecture: str, tmp_path: Path) -> None:
    heads = 64 // HEAD_DIM
    hf_model = tiny_hf_model(architecture, num_attention_heads=heads, num_key_value_heads=max(1, heads // 2))
    save(hf_model, tmp_path)
    edit_config(tmp_path, ["head_dim"])
    check_parity(hf_model, tmp_path)


def test_head_dim_apart_from_hidden_size(tmp_path: Path) -> None:
    hf_model = tiny_hf_model("qwen3", head_dim=2 * HEAD_DIM)
    save(hf_model, tmp_path)
    check_parity(hf_model, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("mistral", {"sliding_window": 12}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
    ],
)
def test_sliding_window_shorter_than_the_prompt(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    hf_model = tiny_hf_model(architecture, **overrides)
    save(hf_model, tmp_path)
    windowed = check_parity(hf_model, tmp_path)
    everything = hf_logits(tiny_hf_model(architecture), prompt(LENGTH))
    assert_visible(windowed, everything)


def test_mistral_with_layer_types_windows_only_those_layers(tmp_path: Path) -> None:
    mistral = tiny_hf_model("mistral", sliding_window=12)
    save(mistral, tmp_path)
    layer_types = ["full_attention", "sliding_attention", "full_attention"]
    edit_config(tmp_path, layer_types=layer_types)
    # Hugging Face windows by layer in Ministral only, which is otherwise the same model.
    config = {
        key: value for key, value in mistral.config.to_dict().items() if key not in ("model_type", "architectures")
    }
    ministral = MinistralForCausalLM(MinistralConfig(**(config | {"layer_types": layer_types}))).eval()
    ministral.load_state_dict(mistral.state_dict())
    check_parity(ministral, tmp_path)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    hf_model = tiny_hf_model("llama")
    save(hf_model, tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    check_parity(hf_model, tmp_path)


def test_a_batch_equals_its_requests_alone(tmp_path: Path) -> None:
    model = load_tiny(save(tiny_hf_model("mistral", sliding_window=12), tmp_path))
    prompts = [prompt(length, seed) for seed, length in enumerate((9, 40, 23))]
    alone = [PagedRunner(model).run(ids, [len(ids)]) for ids in prompts]
    runner = PagedRunner(model, requests=3)
    # Step 1: two prefills; step 2: the first decodes, the second goes on, the third starts.
    first = runner.step([(0, prompts[0][:8]), (0, prompts[1][:30]), (0, prompts[2][:0])])
    second = runner.step([(8, prompts[0][8:]), (30, prompts[1][30:]), (0, prompts[2])])
    batched = [torch.cat([first[:8], second[:1]]), torch.cat([first[8:], second[1:11]]), second[11:]]
    for ours, expected in zip(batched, alone, strict=True):
        tolerances.check("logits", ours - expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_is_as_accurate_as_hugging_face(architecture: str, tmp_path: Path) -> None:
    hf_model = tiny_hf_model(architecture).bfloat16()
    save(hf_model, tmp_path)
    ids = prompt(LENGTH)
    exact = hf_logits(hf_model.float(), ids)
    theirs = (hf_logits(hf_model.bfloat16(), ids) - exact).square().mean().sqrt()
    ours = PagedRunner(load_tiny(str(tmp_path), dtype=torch.bfloat16)).run(ids, [30, 40])
    assert (ours - exact).square().mean().sqrt() <= 1.3 * theirs
