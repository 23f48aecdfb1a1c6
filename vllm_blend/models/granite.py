"""Granite 3 and 4 dense models (IBM, 2024)."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, attention_biases


class GraniteForCausalLM(DecoderForCausalLM):
    """Llama with scales of its own (muP: Yang et al., 2022) on embeddings, attention, residual stream and logits."""

    serves = "Granite 3 and 4, dense"
    takes_quantization = False

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        return DecoderSpec.from_hf(
            hf_config,
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            attention_scale=float(hf_config.attention_multiplier),
            embedding_scale=float(hf_config.embedding_multiplier),
            residual_scale=float(hf_config.residual_multiplier),
            logits_divisor=float(hf_config.logits_scaling),
            **attention_biases(hf_config),
        )
