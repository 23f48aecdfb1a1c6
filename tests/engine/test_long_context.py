"""Contexts that RoPE extends, in every way to compute a prompt, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.blend.reference import BlendReference
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs, check_entries
from tests.engine.engines import TINY_VOCABULARY, engine, greedy, hf_model, new_llm, run, tiny_model
from tests.models.tiny import HEAD_DIM
from tests.tolerances import tolerance
from vllm_blend.config import ModelConfig
from vllm_blend.engine.setup import resolve_max_model_len

ORIGINAL, FACTOR = 24, 4.0
LENGTHS = {"max_position_embeddings": 30}  # Qwen3's config.json says 40960 for an original context of 32768
YARN = {"rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.05 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1 + 0.4 * i for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": ORIGINAL,
}
MODELS: dict[str, dict[str, Any]] = {
    "yarn": LENGTHS | {"rope_parameters": YARN},
    "longrope": {"rope_parameters": LONGROPE},
    "linear": {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "linear", "factor": FACTOR}},
    "llama3": {
        "rope_parameters": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "original_max_position_embeddings": ORIGINAL,
        }
    },
    "dynamic": {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": FACTOR}},
}
IDS = [(7 * i * i + 3 * i + 1) % TINY_VOCABULARY for i in range(88)]
CHUNKED: dict[str, Any] = {"prefix": IDS[:5], "chunks": [IDS[5:60], IDS[60:70]], "suffix": IDS[70:80]}
PARAMS = greedy(6, logprobs=3, ignore_eos=True)


@pytest.mark.parametrize("rope", [name for name in MODELS if name != "dynamic"])
def test_every_way_to_compute_a_prompt_below_and_beyond_the_original_context(rope: str) -> None:
    directory = tiny_model("qwen3", rope_theta=1e4, **MODELS[rope])
    reference = hf_model(directory)
    short = 12 if rope != "longrope" else ORIGINAL + 1  # transformers rotates shorter ones by the short set
    prompts = [{"prompt_token_ids": IDS[:n]} for n in (short, ORIGINAL + 1, 88)]
    for steps in (256, 16):
        settings = {"max_num_batched_tokens": steps, "max_num_seqs": 4}
        with engine(directory, max_model_len=96, enable_blending=True, **settings) as llm:
            for output in run(llm, prompts, greedy(6, logprobs=3, prompt_logprobs=1, ignore_eos=True)):
                assert_logprobs_match(output, reference)
            for rule, chunks in (({"blend_selector": "full"}, 2), ({"blend_selector": "none"}, 1)):
                for _ in range(2):  # the second time from the store; one chunk where it was encoded is exact
                    [output] = run(llm, {**CHUNKED, "chunks": CHUNKED["chunks"][:chunks], **rule}, PARAMS)
                    assert_logprobs_match(output, reference)
                assert output.blend is not None


def test_reused_chunks_are_rotated_by_the_scaled_tables() -> None:
    directory = tiny_model("llama", rope_theta=1e4, **MODELS["yarn"])
    reference = BlendReference(hf_model(directory))
    with engine(directory, enable_blending=True) as llm:
        assert llm.llm_engine.max_model_len == ORIGINAL * FACTOR
        [output] = run(llm, {**CHUNKED, "blend_selector": "none"}, PARAMS)
    blended = reference.blend(reference.compose(CHUNKED["prefix"], CHUNKED["chunks"]), CHUNKED["suffix"], "none", 0)
    [completion] = output.outputs
    assert completion.logprobs is not None
    check_entries(completion.logprobs, completion.token_ids, reference.decode(blended, completion.token_ids))


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_within_the_original_context_by_default(rope: str) -> None:
    """The default length is the original one, so that no prompt is rotated otherwise than by transformers."""
    directory = tiny_model("llama", rope_theta=1e4, **MODELS[rope])
    with engine(directory) as llm:
        assert llm.llm_engine.max_model_len == ORIGINAL
        prompts = [{"prompt_token_ids": IDS[:n]} for n in (4, 17)]
        for output in run(llm, prompts, greedy(6, logprobs=3, prompt_logprobs=1, ignore_eos=True)):
            assert_logprobs_match(output, hf_model(directory))


def test_dynamic_beyond_the_original_context_has_the_base_of_max_model_len() -> None:
    directory = tiny_model("llama", rope_theta=1e4, **MODELS["dynamic"])
    with engine(directory, max_model_len=48) as llm:
        [output] = run(llm, {"prompt_token_ids": IDS[:47]}, greedy(1, logprobs=3, ignore_eos=True))
        [entry] = output.outputs[0].logprobs or []
        with torch.no_grad():
            logits = hf_model(directory)(input_ids=torch.tensor([[*IDS[:47], 0]])).logits
        whole = logits[0, 46].log_softmax(-1)
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(whole[token]), abs=tolerance().logprobs.largest)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL}},
        lambda config: config.update({"rope_parameters": {**config.rope_parameters, **YARN}}) or config,
    ],
)
def test_hf_overrides_are_what_config_json_would_say(overrides: Any) -> None:
    plain = tiny_model("llama", rope_theta=500.0, **LENGTHS)
    extended = tiny_model("llama", **LENGTHS, rope_parameters={"rope_theta": 500.0, **YARN})
    prompt = {"prompt_token_ids": IDS[:80]}
    with engine(extended) as llm:
        [expected] = run(llm, prompt, PARAMS)
    llm = new_llm(plain, hf_overrides=overrides)
    assert llm.llm_engine.max_model_len == ORIGINAL * FACTOR
    [output] = run(llm, prompt, PARAMS)
    assert_same_logprobs(output, expected)


def test_chunks_are_kept_apart_by_what_overrides_change_in_the_kv() -> None:
    directory = tiny_model("llama", rope_theta=500.0)

    def digest(**overrides: Any) -> str:
        return new_llm(directory, hf_overrides=overrides or None, max_model_len=48).llm_engine.fingerprint.digest

    same = digest(), digest(eos_token_id=3), digest(max_position_embeddings=64), digest(rope_theta=500.0)
    others = digest(rope_scaling=YARN), digest(rms_norm_eps=1e-2), digest(rope_theta=501.0)
    assert len(set(same)) == 1 and len({*same, *others}) == 4


def test_a_layer_with_another_rotation_makes_other_chunks(tmp_path: Path) -> None:
    directory = tiny_model("mistral", sliding_window=64)
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    found = set()
    for theta in (100.0, 200.0):
        ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": theta}
        overrides = {"layer_types": kinds, "rope_parameters": ropes}
        found.add(new_llm(directory, hf_overrides=overrides).llm_engine.fingerprint.rope)
    assert len(found) == 2


def test_lengths_above_what_the_model_supports() -> None:
    llm = tiny_model("llama", rope_theta=1e4, **MODELS["yarn"])
    assert new_llm(llm, max_model_len=96).llm_engine.max_model_len == 96
    with pytest.raises(ValueError, match=r"max_model_len=97 is above the 96 positions .*lower it.*hf_overrides"):
        new_llm(llm, max_model_len=97)
    with pytest.raises(ValueError, match="has no max_position_embeddings: give max_model_len"):
        resolve_max_model_len(ModelConfig("m"), _Nothing())  # type: ignore[arg-type]
    assert resolve_max_model_len(ModelConfig("m", max_model_len=7), _Nothing()) == 7  # type: ignore[arg-type]


class _Nothing:
    max_position_embeddings = None
