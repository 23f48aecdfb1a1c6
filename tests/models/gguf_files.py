"""Tiny GGUF files, written as llama.cpp's converter would write them, from models of transformers."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.models.tiny import tiny_hf_model

F32, F16, BF16, Q8_0, Q4_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0"))
Arrays = dict[str, np.ndarray]
Entries = dict[str, Any]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
OWN_NAMES = {
    "gemma3": {**NORMS_AFTER, "pre_feedforward_layernorm": "ffn_norm"},
    "olmo2": NORMS_AFTER,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "qwen3moe": {"mlp.gate": "ffn_gate_inp"}
    | {f"mlp.experts.{n}_proj": f"ffn_{n}_exps" for n in ("gate", "up", "down")},
    "mixtral": {"block_sparse_moe.gate": "ffn_gate_inp"}
    | {f"block_sparse_moe.experts.{w}": f"ffn_{n}_exps" for w, n in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}
# What a file is called after (general.architecture), and the model in tests.models.tiny, where these differ.
ARCHITECTURES = {"mixtral": "llama"}
MODELS = {"gpt-oss": "gpt_oss", "mistral3": "ministral3", "qwen3moe": "qwen3_moe"}
INTERLEAVED = ("llama", "mistral3", "granite", "smollm3", "mixtral")
# Rows of whole blocks in every quantized type that is written here.
WIDTHS: Entries = {"intermediate_size": 96}
TRAITS: dict[str, Entries] = {
    "gemma3": {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    },
    "gpt-oss": {"swiglu_limit": 7.0},
    "phi3": {"sliding_window": 12},
    "qwen3moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
}


def gguf_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a model that a GGUF file can hold."""
    return tiny_hf_model(MODELS.get(family, family), **(WIDTHS | TRAITS.get(family, {}) | overrides))


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Put rows that are half a head apart beside each other, as llama.cpp rotates neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def arrays_of(family: str, model: PreTrainedModel) -> Arrays:
    """Return the arrays of a model's file, by their names there."""
    config, names = model.config, NAMES | OWN_NAMES.get(family, {})
    found: Arrays = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in _checkpoint(model).items():
        stem, _, last = name.rpartition(".")
        if family in INTERLEAVED and stem.endswith("q_proj"):
            values = interleaved(values, config.num_attention_heads)
        if family in INTERLEAVED and stem.endswith("k_proj"):
            values = interleaved(values, config.num_key_value_heads)
        if family == "gemma3" and stem.endswith("norm"):
            values = values + 1
        if stem in names:
            found[f"{names[stem]}.{last}"] = values
            continue
        _, _, number, own = stem.split(".", 3)
        if last == "sinks":
            found[f"blk.{number}.attn_sinks.weight"] = values
        elif family == "gpt-oss" and own == "mlp.experts":
            found |= {f"blk.{number}.{theirs}": part for theirs, part in _gpt_oss_experts(last, values).items()}
        elif ".experts." in own:
            every = re.sub(r"\.\d+\.", ".", own)
            experts.setdefault(f"blk.{number}.{names[every]}.{last}", []).append(values)
        else:
            found[f"blk.{number}.{names[own]}.{last}"] = values
    return found | {name: np.stack(each) for name, each in experts.items()}


def _checkpoint(model: PreTrainedModel) -> Arrays:
    """Return the arrays of a model's checkpoint, whose experts are in order."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    numbered = sorted(tensors, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    return {name: tensors[name].float().numpy() for name in numbered}


def _gpt_oss_experts(name: str, values: np.ndarray) -> Arrays:
    what, _, kind = name.partition("_proj")
    last = "bias" if kind else "weight"
    rows = values if kind else values.swapaxes(1, 2)
    if what == "down":
        return {f"ffn_down_exps.{last}": rows}
    return {f"ffn_gate_exps.{last}": rows[:, ::2], f"ffn_up_exps.{last}": rows[:, 1::2]}


def metadata_of(family: str, model: PreTrainedModel) -> Entries:
    """Return the metadata of a model's file, by their names without the architecture."""
    config = model.config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    own = _OWN_METADATA.get(family)
    found |= own(config) if own else {}
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return {name: value for name, value in found.items() if value is not None}


def _experts(config: Any, count: str, width: str = "intermediate_size") -> Entries:
    return {
        "expert_count": getattr(config, count),
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, width),
    }


def _granite(config: Any) -> Entries:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


def _phi3(config: Any) -> Entries:
    rotated = int(config.hidden_size // config.num_attention_heads * config.rope_parameters["partial_rotary_factor"])
    return {
        "attention.key_length": None,
        "rope.dimension_count": rotated,
        "attention.sliding_window": config.sliding_window,
    }


def _mistral3(config: Any) -> Entries:
    rope = config.rope_parameters
    return {
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
    }


_OWN_METADATA: dict[str, Callable[[Any], Entries]] = {
    "gemma3": lambda config: {"attention.sliding_window": config.sliding_window},
    "gpt-oss": lambda config: (
        _experts(config, "num_local_experts") | {"attention.sliding_window": config.sliding_window}
    ),
    "granite": _granite,
    "mistral3": _mistral3,
    "mixtral": lambda config: _experts(config, "num_local_experts"),
    "phi3": _phi3,
    "qwen3moe": lambda config: _experts(config, "num_experts", "moe_intermediate_size"),
}


def write_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = F32,
    change: Callable[[Arrays], None] = lambda arrays: None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    stored: Mapping[str, tuple[np.ndarray, str]] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    parts: int = 1,
) -> str:
    """Write a model's matrices as `kind` and its vectors in float32. `change` edits the arrays, `metadata` replaces
    some (None leaves one out), and so does `stored` with tensors whose bytes are given, of a type. A name that begins
    with a slash has no architecture before it. `vocabulary` are the entries of a tokenizer, in place of names that mean
    nothing. With more than one of `parts` the file is split, and `path` is that of the first."""
    named = architecture or ARCHITECTURES.get(family, family)
    arrays = arrays_of(family, model)
    change(arrays)
    for name, (blocks, _) in (stored or {}).items():
        arrays[name] = blocks
    kinds = {name: gguf.GGMLQuantizationType[its] for name, (_, its) in (stored or {}).items()}
    tokens = {
        "/tokenizer.ggml.tokens": [f"t{i}" for i in range(model.config.vocab_size)],
        "/tokenizer.ggml.eos_token_id": 2,
    }
    entries = metadata_of(family, model) | dict(tokens if vocabulary is None else vocabulary) | dict(metadata or {})
    names = list(arrays)
    size = -(-len(names) // parts)
    for number in range(parts):
        of = Path(str(path).replace("-00001-of-", f"-{number + 1:05}-of-"))
        writer = gguf.GGUFWriter(of, named)
        split = {"/split.no": number, "/split.count": parts} if parts > 1 else {}
        write_metadata(writer, ARCHITECTURES.get(family, family), (entries if number == 0 else {}) | split)
        for name in names[number * size : (number + 1) * size]:
            own = kinds.get(name, kind if arrays[name].ndim > 1 else F32)
            values = arrays[name] if name in kinds else gguf.quantize(arrays[name], own)
            writer.add_tensor(name, values, raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return str(path)


def write_metadata(writer: gguf.GGUFWriter, prefix: str, entries: Mapping[str, Any]) -> None:
    add: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for name, value in entries.items():
        if value is not None:
            add[type(value)](name.removeprefix("/") if name.startswith("/") else f"{prefix}.{name}", value)
