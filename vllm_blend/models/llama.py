"""Llama (Touvron et al., 2023; Llama 3, 2024) and Mistral 7B (Jiang et al., 2023)."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec


class LlamaForCausalLM(DecoderForCausalLM):
    """Full attention in every layer; optional biases in attention and MLP."""

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        mlp_bias = bool(getattr(hf_config, "mlp_bias", False))
        return DecoderSpec.from_hf(hf_config, qkv_bias=attention_bias, out_bias=attention_bias, mlp_bias=mlp_bias)


class MistralForCausalLM(DecoderForCausalLM):
    """Llama without biases; `sliding_window` applies to every layer, or to those that `layer_types` names."""

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        window = getattr(hf_config, "sliding_window", None)
        everywhere = ("full_attention" if window is None else "sliding_attention",) * hf_config.num_hidden_layers
        layer_types = tuple(getattr(hf_config, "layer_types", None) or everywhere)
        return DecoderSpec.from_hf(hf_config, layer_types=layer_types, sliding_window=window)
