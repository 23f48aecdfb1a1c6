"""Llama (Touvron et al., 2023; Llama 3, 2024), Mistral 7B (Jiang et al., 2023), and Ministral (2024; 2025)."""

from __future__ import annotations

from typing import Any

from vllm_blend.layers.query_scale import QueryScale
from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, attention_biases, window_everywhere


class LlamaForCausalLM(DecoderForCausalLM):
    """Full attention in every layer; optional biases in attention and MLP."""

    serves = "Llama 2 and 3, and models of their shape"

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        mlp_bias = bool(getattr(hf_config, "mlp_bias", False))
        return DecoderSpec.from_hf(hf_config, mlp_bias=mlp_bias, **attention_biases(hf_config))


class MistralForCausalLM(DecoderForCausalLM):
    """Llama without biases; `sliding_window` applies to every layer, or to those that `layer_types` names. Ministral 3
    scales its queries by position."""

    serves = "Mistral 7B, Nemo, Small without vision; Ministral"
    windows = "all layers, or those of layer_types, if config.json has one"

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        windows = window_everywhere(hf_config, getattr(hf_config, "sliding_window", None))
        layer_types = getattr(hf_config, "layer_types", None)
        if layer_types:
            windows["layer_types"] = tuple(layer_types)
        return DecoderSpec.from_hf(hf_config, query_scale=_query_scale(hf_config), **windows)


def _query_scale(hf_config: Any) -> QueryScale | None:
    rope = getattr(hf_config, "rope_parameters", None) or {}
    beta = rope.get("llama_4_scaling_beta")
    return None if beta is None else QueryScale(float(beta), int(rope["original_max_position_embeddings"]))
