"""The model families that are read from GGUF files, and how their tensors are called and stored there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_blend.registry import Registry

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class GGUFFamily:
    """A family. `name` is `general.architecture` in a file, `model_type` and `architecture` are those of config.json.

    With `interleaves_heads` the rows of Q and K stand in llama.cpp's order for RoPE, where the two numbers that are
    rotated together are neighbours; in a Hugging Face checkpoint they are half a head apart. With `adds_one` norms
    are stored as what is multiplied by, 1 + weight. With `overflows_float16` activations may leave float16's range.
    """

    name: str
    model_type: str
    architecture: str
    in_layer: Mapping[str, str] = field(default_factory=lambda: _IN_LAYER, repr=False)
    interleaves_heads: bool = False
    adds_one: bool = False
    overflows_float16: bool = False

    def checkpoint_name(self, name: str) -> str:
        """Return what a tensor is called in a Hugging Face checkpoint; as it is, if it has no name there."""
        stem, _, last = name.rpartition(".")
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{last}"
        first, _, rest = stem.partition(".")
        number, _, own = rest.partition(".")
        if first == "blk" and number.isdecimal() and own in self.in_layer:
            return f"model.layers.{number}.{self.in_layer[own]}.{last}"
        return name


_FAMILIES = (
    GGUFFamily("llama", "llama", "LlamaForCausalLM", interleaves_heads=True),
    GGUFFamily("qwen2", "qwen2", "Qwen2ForCausalLM"),
    GGUFFamily("qwen3", "qwen3", "Qwen3ForCausalLM"),
    GGUFFamily(
        "gemma3",
        "gemma3_text",
        "Gemma3ForCausalLM",
        _IN_LAYER | _GEMMA3_NORMS,
        adds_one=True,
        overflows_float16=True,
    ),
)
GGUF_FAMILIES: Registry[GGUFFamily] = Registry("GGUF family", "general.architecture", _FAMILIES)
