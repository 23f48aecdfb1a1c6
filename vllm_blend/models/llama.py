"""Llama (Touvron et al., 2023; Llama 3, 2024) and Mistral 7B (Jiang et al., 2023)."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, attention_biases, window_everywhere


class LlamaForCausalLM(DecoderForCausalLM):
    """Full attention in every layer; optional biases in attention and MLP."""

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        mlp_bias = bool(getattr(hf_config, "mlp_bias", False))
        return DecoderSpec.from_hf(hf_config, mlp_bias=mlp_bias, **attention_biases(hf_config))


class MistralForCausalLM(DecoderForCausalLM):
    """Llama without biases; `sliding_window` applies to every layer, or to those that `layer_types` names."""

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        windows = window_everywhere(hf_config, getattr(hf_config, "sliding_window", None))
        layer_types = getattr(hf_config, "layer_types", None)
        return DecoderSpec.from_hf(hf_config, **windows | ({"layer_types": tuple(layer_types)} if layer_types else {}))
