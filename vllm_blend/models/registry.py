"""Which class runs which Hugging Face architecture."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm_blend.models.llama import LlamaForCausalLM, MistralForCausalLM
from vllm_blend.models.qwen2 import Qwen2ForCausalLM
from vllm_blend.models.qwen3 import Qwen3ForCausalLM

MODEL_REGISTRY: dict[str, type[nn.Module]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
"""Architecture name -> model class, called as cls(hf_config, max_position). Add an entry to serve a model of your own;
it needs what `CausalLM` offers: `model` (with `layers[i].self_attn`), `forward(input_ids)` and
`compute_logits(hidden)`."""


def resolve_model_class(hf_config: Any) -> type[nn.Module]:
    """The class for the first known name in `hf_config.architectures`; ValueError when there is none."""
    architectures = list(getattr(hf_config, "architectures", None) or [])
    for name in architectures:
        if name in MODEL_REGISTRY:
            return MODEL_REGISTRY[name]
    named = ", ".join(map(repr, architectures)) or "none (config.json has no 'architectures')"
    raise ValueError(f"unsupported model architecture: {named}; known: {', '.join(sorted(MODEL_REGISTRY))}")
