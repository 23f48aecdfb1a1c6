"""Mixtures of experts: Mixtral (Jiang et al., 2024) and Qwen3-MoE (Yang et al., 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm_blend.layers.experts import ExpertsSpec
from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, attention_biases, window_everywhere


class MixtralForCausalLM(DecoderForCausalLM):
    """Mistral in which every MLP is a mixture."""

    serves = "Mixtral"
    windows = "all layers, if config.json has one"
    takes_quantization = False
    checkpoint_names: ClassVar = {
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".down_proj.": ".w2.",
        ".up_proj.": ".w3.",
    }

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        experts = ExpertsSpec(
            hf_config.num_local_experts,
            hf_config.num_experts_per_tok,
            hf_config.intermediate_size,
            normalizes=True,
            layers=frozenset(range(hf_config.num_hidden_layers)),
        )
        windows = window_everywhere(hf_config, getattr(hf_config, "sliding_window", None))
        return DecoderSpec.from_hf(hf_config, experts=experts, **windows)


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """Qwen3 in which all MLPs are mixtures, but those of `mlp_only_layers` and between `decoder_sparse_step`s.

    With `use_sliding_window` all layers see a window, unlike Qwen3's, as in transformers.
    """

    serves = "Qwen3, mixtures of experts"
    windows = "all layers, with use_sliding_window"
    takes_quantization = False

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        step, dense = hf_config.decoder_sparse_step, set(hf_config.mlp_only_layers or ())
        sparse = {layer for layer in range(hf_config.num_hidden_layers) if (layer + 1) % step == 0} - dense
        experts = ExpertsSpec(
            hf_config.num_experts,
            hf_config.num_experts_per_tok,
            hf_config.moe_intermediate_size,
            normalizes=bool(hf_config.norm_topk_prob),
            layers=frozenset(sparse),
        )
        window = hf_config.sliding_window if getattr(hf_config, "use_sliding_window", False) else None
        windows, biases = window_everywhere(hf_config, window), attention_biases(hf_config)
        return DecoderSpec.from_hf(hf_config, qk_norm=True, experts=experts, **biases, **windows)
