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
_NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA3 = _IN_LAYER | _NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_PHI3 = _IN_LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS = _IN_LAYER | {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
# Matrices of all experts of a layer in one tensor, and where each expert's own stands in a checkpoint.
_QWEN3_EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")}
_MIXTRAL_EXPERTS = {
    f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.w{number}"
    for name, number in (("gate", 1), ("down", 2), ("up", 3))
}


@dataclass(frozen=True)
class GGUFFamily:
    """A family. `name` is `general.architecture` in a file, `model_type` and `architecture` are those of config.json.

    `in_layer` has the names of a layer's tensors, `experts` those of stacked ones. With `fuses_experts` they go into
    one tensor of gate and up, and one of down, as in gpt-oss. With `interleaves_heads` the rows of Q and K stand in
    llama.cpp's order for RoPE, where the two numbers that are rotated together are neighbours; in a Hugging Face
    checkpoint they are half a head apart. With `adds_one` norms are stored as what is multiplied by, 1 + weight. With
    `overflows_float16` activations may leave float16's range.
    """

    name: str
    model_type: str
    architecture: str
    in_layer: Mapping[str, str] = field(default_factory=lambda: _IN_LAYER, repr=False)
    experts: Mapping[str, str] = field(default_factory=dict, repr=False)
    fuses_experts: bool = False
    interleaves_heads: bool = False
    adds_one: bool = False
    overflows_float16: bool = False

    def checkpoint_name(self, name: str) -> str:
        """Return what a tensor is called in a Hugging Face checkpoint; as it is, if it has no name there. Names of
        stacked experts have a place for the expert's number."""
        stem, _, last = name.rpartition(".")
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{last}"
        first, _, rest = stem.partition(".")
        number, _, own = rest.partition(".")
        theirs = self.in_layer.get(own) or self.experts.get(own)
        if first != "blk" or not number.isdecimal() or theirs is None:
            return name
        return f"model.layers.{number}.{theirs}" + ("" if own == "attn_sinks" else f".{last}")


MIXTRAL = GGUFFamily(
    "llama",
    "mixtral",
    "MixtralForCausalLM",
    _IN_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
    _MIXTRAL_EXPERTS,
    interleaves_heads=True,
)
_FAMILIES = (
    GGUFFamily("llama", "llama", "LlamaForCausalLM", interleaves_heads=True),
    GGUFFamily("mistral3", "mistral", "MistralForCausalLM", interleaves_heads=True),
    GGUFFamily("granite", "granite", "GraniteForCausalLM", interleaves_heads=True),
    GGUFFamily("smollm3", "smollm3", "SmolLM3ForCausalLM", interleaves_heads=True),
    GGUFFamily("qwen2", "qwen2", "Qwen2ForCausalLM"),
    GGUFFamily("qwen3", "qwen3", "Qwen3ForCausalLM"),
    GGUFFamily(
        "qwen3moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _IN_LAYER | {"ffn_gate_inp": "mlp.gate"},
        _QWEN3_EXPERTS,
    ),
    GGUFFamily("phi3", "phi3", "Phi3ForCausalLM", _PHI3),
    GGUFFamily("olmo2", "olmo2", "Olmo2ForCausalLM", _IN_LAYER | _NORMS_AFTER),
    GGUFFamily("gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA3, adds_one=True, overflows_float16=True),
    GGUFFamily(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        _GPT_OSS,
        {"ffn_gate_exps": "mlp.experts.gate", "ffn_up_exps": "mlp.experts.up", "ffn_down_exps": "mlp.experts.down"},
        fuses_experts=True,
        overflows_float16=True,
    ),
)
GGUF_FAMILIES: Registry[GGUFFamily] = Registry("GGUF family", "general.architecture", _FAMILIES)
