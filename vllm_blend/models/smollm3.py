"""SmolLM3 (Hugging Face, 2025)."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, attention_biases
from vllm_blend.models.qwen2 import qwen_windows


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """Llama in which every fourth layer, or those that `no_rope_layers` marks with 0, has no RoPE."""

    serves = "SmolLM3"
    windows = "the layers of layer_types, with use_sliding_window"

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        return DecoderSpec.from_hf(
            hf_config,
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            rotates=tuple(bool(rotates) for rotates in hf_config.no_rope_layers),
            **attention_biases(hf_config),
            **qwen_windows(hf_config),
        )
