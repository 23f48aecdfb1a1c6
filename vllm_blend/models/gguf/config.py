"""The Hugging Face config of the model in a GGUF file, from the file's metadata and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from vllm_blend.checks import is_whole
from vllm_blend.models.gguf.families import GGUFFamily
from vllm_blend.models.gguf.header import GGUFHeader
from vllm_blend.models.gguf.metadata import Metadata, UnfitFile
from vllm_blend.models.gguf.rope import rope_scaling
from vllm_blend.models.gguf.tensors import family_of

EMBEDDING = "token_embd.weight"
GEMMA3_27B_LAYERS = 62  # whose attention is scaled by hidden_size / heads; of the others by head_dim
GEMMA3_PATTERN = 6  # every sixth layer sees everything
GEMMA3_LOCAL_THETA = 10000.0
GPT_OSS_LIMIT = 7.0  # of the gates, which no file names
FULL_PRECISION, BF16 = {0, 28}, 30  # ggml's numbers of F32 and F64, and of BF16
END_TOKENS = ("eos", "eot", "eom")  # of a text, of a turn, and of a message that a tool is to answer


def gguf_config(header: GGUFHeader) -> Any:
    """Return the config. Raises ValueError naming the file, and the metadata that are missing, wrong or unknown."""
    family = family_of(header)
    try:
        fields = _fields(Metadata(header, family.name), header, family)
    except UnfitFile as error:
        raise ValueError(
            f"{header.path}: {error}; fetch the file again if it may be damaged, or give the directory of the same "
            "model in safetensors"
        ) from error
    architecture = fields.pop("architecture", family.architecture)
    config = AutoConfig.for_model(fields.pop("model_type", family.model_type), **fields)
    config.architectures = [architecture]
    return config


def _fields(own: Metadata, header: GGUFHeader, family: GGUFFamily) -> dict[str, Any]:
    """Return the fields of config.json, those of RoPE in transformers 4's words, which 5 knows as well."""
    if EMBEDDING not in header.tensors or len(header.tensors[EMBEDDING].shape) != 2:
        raise UnfitFile(f"it has no matrix {EMBEDDING}")
    heads, hidden = own.count("attention.head_count"), own.count("embedding_length")
    head_dim = own.count("attention.key_length", max(1, hidden // heads))
    own.refuse("attention.value_length", head_dim)
    own.refuse("attention.causal", True)
    rotary_dim = own.count("rope.dimension_count", head_dim) if family.name == "phi3" else head_dim
    own.refuse("rope.dimension_count", rotary_dim)
    vocab_size = header.tensors[EMBEDDING].shape[0]
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": _num_layers(own, header),
        "num_attention_heads": heads,
        "num_key_value_heads": own.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own.count("context_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": own.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(own, header, rotary_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header, family),
        "bos_token_id": next(iter(_tokens(header, vocab_size, "bos")), None),
        "pad_token_id": next(iter(_tokens(header, vocab_size, "padding")), None),
    }
    ends = _tokens(header, vocab_size, *END_TOKENS)
    fields["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    fields["intermediate_size"] = own.count("feed_forward_length", None if not family.experts else 1)
    fields |= _OWN_FIELDS[family.model_type](own, fields) if family.model_type in _OWN_FIELDS else {}
    if not family.experts:
        own.refuse("expert_count", 0)
    if "sliding_window" not in fields:
        own.refuse("attention.sliding_window", 0)
    if not {"attention_multiplier", "query_pre_attn_scalar"} & fields.keys():
        own.refuse("attention.scale", 0.0, head_dim**-0.5)
    if rotary_dim != head_dim:
        fields["partial_rotary_factor"] = rotary_dim / head_dim
    if family.name in ("llama", "granite", "smollm3"):
        fields |= {
            "attention_bias": "blk.0.attn_q.bias" in header.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        }
    return fields


def _tokens(header: GGUFHeader, vocab_size: int, *names: str) -> list[int]:
    """Return the ids that a file has of these special tokens, each once. Some converters wrote one outside of the
    vocabulary for none."""
    found: list[Any] = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return list(dict.fromkeys(int(token) for token in found if is_whole(token) and 0 <= token < vocab_size))


def _num_layers(own: Metadata, header: GGUFHeader) -> int:
    """Return how many layers there are, no more than there are tensors of: configs have a list of them."""
    layers = own.count("block_count")
    parts = [name.split(".") for name in header.tensors]
    found = len({part[1] for part in parts if len(part) > 2 and part[0] == "blk" and part[1].isdecimal()})
    if layers > found:
        raise UnfitFile(f"{own.full_name('block_count')} is {layers}, but the file has tensors of {found} layers")
    return layers


def _gemma3(own: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    layers, head_dim = fields["num_hidden_layers"], fields["head_dim"]
    is_27b = layers == GEMMA3_27B_LAYERS
    pattern = own.count("attention.sliding_window_pattern", GEMMA3_PATTERN)
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    scalar = fields["hidden_size"] // fields["num_attention_heads"] if is_27b else head_dim
    own.refuse("attention.scale", 0.0, max(1, scalar) ** -0.5)
    own.refuse("attn_logit_softcapping", 0.0)
    capped = own.get("final_logit_softcapping") not in (None, 0.0)
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": own.count("attention.sliding_window"),
        "layer_types": kinds,
        "rope_local_base_freq": own.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA),
        "rope_theta": own.number("rope.freq_base", 1e6),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": own.number("final_logit_softcapping") if capped else None,
    }


def _granite(own: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    own.refuse("rope.scaling.finetuned", True)  # False: there is no RoPE at all
    return {
        "attention_multiplier": own.number("attention.scale", fields["head_dim"] ** -0.5),
        "embedding_multiplier": own.number("embedding_scale", 1.0),
        "residual_multiplier": own.number("residual_scale", 1.0),
        "logits_scaling": own.number("logit_scale"),
    }


def _phi3(own: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp leaves the window out, which the models have."""
    window = own.get("attention.sliding_window")
    scaling = fields["rope_scaling"] or {}
    return {
        "sliding_window": None if window in (None, 0) else own.count("attention.sliding_window"),
        "original_max_position_embeddings": scaling.get(
            "original_max_position_embeddings", fields["max_position_embeddings"]
        ),
    }


def _mistral(own: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what Ministral 3 has more: queries that are scaled by position."""
    if own.get("attention.temperature_scale") is None:
        return {"sliding_window": None}
    scaling = fields["rope_scaling"]
    if scaling is None or scaling["rope_type"] != "yarn":
        raise UnfitFile(f"{own.full_name('attention.temperature_scale')} needs rope.scaling.type yarn")
    own.refuse("attention.temperature_length", scaling["original_max_position_embeddings"])
    beta = own.number("attention.temperature_scale")
    return {
        "model_type": "ministral3",
        "architecture": "Ministral3ForCausalLM",
        "sliding_window": None,
        "rope_scaling": scaling | {"llama_4_scaling_beta": beta},
    }


def _experts(own: Metadata) -> tuple[int, int]:
    """Return how many experts a layer has, and how many a token."""
    for name, fine in (
        ("expert_shared_count", (0,)),
        ("expert_group_count", (0, 1)),
        ("expert_weights_scale", (0.0, 1.0)),
    ):
        own.refuse(name, *fine)
    return own.count("expert_count"), own.count("expert_used_count")


def _mixtral(own: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, used = _experts(own)
    return {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": own.count("feed_forward_length"),
        "sliding_window": None,
    }


def _qwen3_moe(own: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, used = _experts(own)
    own.refuse("expert_gating_func", 1)  # softmax
    width = own.count("expert_feed_forward_length", max(1, fields["intermediate_size"] // used))
    return {"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": width, "norm_topk_prob": True}


def _gpt_oss(own: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    count, used = _experts(own)
    own.refuse("attention.sliding_window_pattern", 2)
    scaling = fields["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling = scaling | {"truncate": False}  # as in the published config.json; no file says so
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(fields["num_hidden_layers"])]
    return {
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "intermediate_size": own.count("expert_feed_forward_length"),
        "sliding_window": own.count("attention.sliding_window"),
        "layer_types": kinds,
        "swiglu_limit": GPT_OSS_LIMIT,
        "rope_scaling": scaling,
        "attention_bias": True,
    }


# What a family's config has of its own, by its model_type.
_OWN_FIELDS: dict[str, Callable[[Metadata, dict[str, Any]], dict[str, Any]]] = {
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "qwen3_moe": _qwen3_moe,
}


def _dtype(header: GGUFHeader, family: GGUFFamily) -> torch.dtype:
    """Return the dtype of the model: that of its matrices, or half precision for quantized ones."""
    kinds = {place.kind for place in header.tensors.values() if len(place.shape) > 1}
    if kinds <= FULL_PRECISION:
        return torch.float32
    return torch.bfloat16 if family.overflows_float16 or kinds <= {*FULL_PRECISION, BF16} else torch.float16
