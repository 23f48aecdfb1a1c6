"""What `hf_overrides` change in a config, and what they may not say."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig

from vllm_blend.models.hf_overrides import apply_hf_overrides

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def base() -> LlamaConfig:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e4}
    return LlamaConfig(num_hidden_layers=3, max_position_embeddings=128, rope_parameters=rope, architectures=["A"])


def base_rope(**changes: float) -> dict[str, Any]:
    return dict(base().rope_parameters or {}) | changes


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ({"rms_norm_eps": 1e-3, "architectures": ["B"]}, {"rms_norm_eps": 1e-3, "architectures": ["B"]}),
        ({"rope_parameters": {"factor": 3.0}}, {"rope_parameters": base_rope(factor=3.0)}),
        ({"rope_scaling": YARN}, {"rope_parameters": {"rope_theta": 7e4, **YARN}}),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 5.0}, {
            "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0}
        }),
        ({"rope_scaling": {"factor": 8.0}, "rope_theta": 6.0, "rope_parameters": {"factor": 3.0}}, {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 6.0}  # its own name comes first
        }),
        ({"rope_theta": 9.0}, {"rope_parameters": base_rope(rope_theta=9.0)}),
    ],
)  # fmt: skip
def test_dicts_are_merged(overrides: dict[str, Any], changed: dict[str, Any]) -> None:
    given = base()
    expected = {**given.to_dict(), **changed}
    assert apply_hf_overrides(given, overrides).to_dict() == expected
    assert given.to_dict() == base().to_dict(), "the config itself stays as it is"


def test_a_function_returns_the_config() -> None:
    given = base()

    def narrow(config: PreTrainedConfig) -> PreTrainedConfig:
        config.num_hidden_layers = 1
        return config

    assert apply_hf_overrides(given, narrow).num_hidden_layers == 1
    assert given.num_hidden_layers == 3
    with pytest.raises(ValueError, match="returned None: return the changed config"):
        apply_hf_overrides(given, lambda config: config.update({}))
    with pytest.raises(ValueError, match="the function in hf_overrides failed: AttributeError"):
        apply_hf_overrides(given, lambda config: config.nonesuch)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scalling": YARN}, "the model's config has no 'rope_scalling': did you mean 'rope_scaling'"),
        ({"zzz": 1}, "the model's config has no 'zzz'$"),
        ({"num_hidden_layers": "many"}, "make no usable config.*num_hidden_layers"),
        ({"rope_scaling": [4.0]}, "make no usable config"),
    ],
)
def test_what_cannot_be_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)hf_overrides.*{message}"):
        apply_hf_overrides(base(), overrides)


def test_flat_rope_parameters_do_not_go_with_those_by_layer_type() -> None:
    by_type = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = MistralConfig(rope_parameters=by_type)
    with pytest.raises(ValueError, match="differs by layer type here: give rope_parameters for full_attention"):
        apply_hf_overrides(config, {"rope_scaling": YARN})
