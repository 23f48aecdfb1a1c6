"""The registry of models: which class runs which Hugging Face architecture."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm_blend.models.gemma3 import Gemma3ForCausalLM
from vllm_blend.models.gpt_oss import GptOssForCausalLM
from vllm_blend.models.granite import GraniteForCausalLM
from vllm_blend.models.llama import LlamaForCausalLM, MistralForCausalLM
from vllm_blend.models.mixtures import MixtralForCausalLM, Qwen3MoeForCausalLM
from vllm_blend.models.olmo2 import Olmo2ForCausalLM
from vllm_blend.models.phi3 import Phi3ForCausalLM
from vllm_blend.models.qwen2 import Qwen2ForCausalLM
from vllm_blend.models.qwen3 import Qwen3ForCausalLM
from vllm_blend.models.smollm3 import SmolLM3ForCausalLM
from vllm_blend.models.text_parts import ARCHITECTURES as TEXT_PARTS
from vllm_blend.registry import Registry

_MODELS: dict[str, type[nn.Module]] = {
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "GraniteForCausalLM": GraniteForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "Ministral3ForCausalLM": MistralForCausalLM,
    "MinistralForCausalLM": MistralForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "MixtralForCausalLM": MixtralForCausalLM,
    "Olmo2ForCausalLM": Olmo2ForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
    **TEXT_PARTS,
}
MODEL_REGISTRY: Registry[type[nn.Module]] = Registry("model architecture", "architectures", _MODELS)
"""Architecture name -> model class, called as cls(hf_config, max_position). Add an entry to serve a model of your own;
it is an nn.Module that meets the `CausalLM` protocol."""


def resolve_model_class(hf_config: Any) -> type[nn.Module]:
    """Return the class for the first known name in `hf_config.architectures`. Raises ValueError if there is none."""
    architectures = list(getattr(hf_config, "architectures", None) or [])
    for name in architectures:
        if name in MODEL_REGISTRY:
            return MODEL_REGISTRY[name]
    named = ", ".join(map(repr, architectures)) or "none (config.json has no 'architectures')"
    raise ValueError(f"unsupported model architecture: {named}; known: {', '.join(MODEL_REGISTRY.names())}")
