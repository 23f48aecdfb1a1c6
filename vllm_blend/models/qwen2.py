"""Qwen2 and Qwen2.5 (Yang et al., 2024)."""

from __future__ import annotations

from typing import Any

from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Llama with biases on Q, K and V only; with `use_sliding_window` the upper layers see a window."""

    serves = "Qwen2 and Qwen2.5"
    windows = "the upper layers, with use_sliding_window"

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        return DecoderSpec.from_hf(hf_config, qkv_bias=True, **qwen_windows(hf_config))


def qwen_windows(hf_config: Any) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window` of a Qwen config.

    Configs that predate layer_types have max_window_layers instead.
    """
    layers = hf_config.num_hidden_layers
    window = getattr(hf_config, "sliding_window", None)
    if window is None or not getattr(hf_config, "use_sliding_window", False):
        return {"layer_types": ("full_attention",) * layers, "sliding_window": None}
    layer_types = getattr(hf_config, "layer_types", None)
    if layer_types is None:
        full = hf_config.max_window_layers
        layer_types = ["full_attention" if layer < full else "sliding_attention" for layer in range(layers)]
    return {"layer_types": tuple(layer_types), "sliding_window": window}
