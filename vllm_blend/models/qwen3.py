"""Qwen3, dense models (Yang et al., 2025)."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, attention_biases
from vllm_blend.models.qwen2 import qwen_windows


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Llama with each head of Q and K normalised before RoPE; `attention_bias` adds biases to all four projections."""

    serves = "Qwen3, dense"
    windows = "the upper layers, with use_sliding_window"

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        return DecoderSpec.from_hf(hf_config, qk_norm=True, **attention_biases(hf_config), **qwen_windows(hf_config))
