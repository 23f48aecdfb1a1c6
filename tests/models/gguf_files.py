"""Tiny GGUF files, written as llama.cpp's converter would write them, from models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from tests.models.tiny import tiny_hf_model

F32, F16, BF16, Q8_0, Q4_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0"))
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
GEMMA3_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Rows of whole blocks in every quantized type that is written here.
WIDTHS: dict[str, Any] = {"intermediate_size": 96}
TRAITS: dict[str, dict[str, Any]] = {
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
}
Arrays = dict[str, np.ndarray]


def gguf_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a model that a GGUF file can hold."""
    return tiny_hf_model(family, **(WIDTHS | TRAITS.get(family, {}) | overrides))


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Put rows that are half a head apart beside each other, as llama.cpp rotates neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def arrays_of(family: str, model: PreTrainedModel) -> Arrays:
    """Return the arrays of a model's file, by their names there."""
    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, last = name.rpartition(".")
        values = tensor.float().numpy()
        if family == "llama" and stem.endswith("q_proj"):
            values = interleaved(values, config.num_attention_heads)
        if family == "llama" and stem.endswith("k_proj"):
            values = interleaved(values, config.num_key_value_heads)
        if family == "gemma3" and stem.endswith("norm"):
            values = values + 1
        names = GEMMA3_NAMES if family == "gemma3" else NAMES
        if stem in names:
            found[f"{names[stem]}.{last}"] = values
        else:
            _, _, number, own = stem.split(".", 3)
            found[f"blk.{number}.{names[own]}.{last}"] = values
    return found


def metadata_of(family: str, model: PreTrainedModel) -> dict[str, Any]:
    """Return the metadata of a model's file, by their names without the architecture."""
    config = model.config
    rope = config.rope_parameters
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else None,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if family == "gemma3":
        found["attention.sliding_window"] = config.sliding_window
    return {name: value for name, value in found.items() if value is not None}


def write_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = F32,
    change: Callable[[Arrays], None] = lambda arrays: None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    stored: Mapping[str, tuple[np.ndarray, str]] | None = None,
) -> str:
    """Write a model's matrices as `kind` and its vectors in float32. `change` edits the arrays, `metadata` replaces
    some (None leaves one out), and so does `stored` with tensors whose bytes are given, of a type."""
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_name("tiny")
    writer.add_token_list([f"t{i}" for i in range(model.config.vocab_size)])
    writer.add_eos_token_id(2)
    for name, value in (metadata_of(family, model) | dict(metadata or {})).items():
        add: dict[type, Any] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](name.removeprefix("/") if name.startswith("/") else f"{family}.{name}", value)
    arrays = arrays_of(family, model)
    change(arrays)
    for name, (blocks, its) in (stored or {}).items():
        arrays.pop(name)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType[its])
    for name, values in arrays.items():
        own = kind if values.ndim == 2 else F32
        writer.add_tensor(name, gguf.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
