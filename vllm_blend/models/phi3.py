"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024), text models without experts."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, window_everywhere


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama whose checkpoints have fused matrices; RoPE may turn a part of each head only, and often is LongRoPE."""

    serves = "Phi-3, Phi-3.5 and Phi-4, text models without experts"
    windows = "all layers, if config.json has one"

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        windows = window_everywhere(hf_config, getattr(hf_config, "sliding_window", None))
        return DecoderSpec.from_hf(hf_config, is_fused=True, **windows)
