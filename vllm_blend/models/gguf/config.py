"""The Hugging Face config of the model in a GGUF file, from the file's metadata and the shapes of its tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from vllm_blend.checks import is_number, is_whole
from vllm_blend.models.gguf.families import GGUFFamily
from vllm_blend.models.gguf.header import GGUFHeader
from vllm_blend.models.gguf.tensors import family_of, read_tensor

ROPE_FACTORS = "rope_freqs.weight"  # what llama.cpp divides RoPE's frequencies by, in place of Llama 3's scaling
EMBEDDING = "token_embd.weight"
GEMMA3_27B_LAYERS = 62  # whose attention is scaled by hidden_size / heads; of the others by head_dim
GEMMA3_PATTERN = 6  # every sixth layer sees everything
GEMMA3_LOCAL_THETA = 10000.0
FULL_PRECISION, BF16 = {0, 28}, 30  # ggml's numbers of F32 and F64, and of BF16
LLAMA3_LENGTH = 8192  # on which Llama 3's scaling builds; a GGUF file has only what follows from it


def gguf_config(header: GGUFHeader) -> Any:
    """Return the config. Raises ValueError naming the file, and the metadata that are missing, wrong or unknown."""
    parts: Any = header.metadata.get("split.count")
    if is_whole(parts) and parts > 1:
        raise ValueError(f"{header.path} is one of {parts} parts of a file: join them (llama-gguf-split --merge)")
    family = family_of(header)
    try:
        fields = _fields(_Metadata(header, family.name), header, family)
    except _Unfit as error:
        raise ValueError(
            f"{header.path}: {error}; fetch the file again if it may be damaged, or give the directory of the same "
            "model in safetensors"
        ) from error
    config = AutoConfig.for_model(family.model_type, **fields)
    config.architectures = [family.architecture]
    return config


class _Unfit(Exception):
    """Why there is no config for a file."""


def _equal(value: Any, other: Any) -> bool:
    """Return whether a file's value is another one, which has been float32 if it is a number."""
    if is_number(value) and is_number(other):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)


class _Metadata:
    """The metadata of a file's own architecture, by names without it."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self._found, self._prefix = header.metadata, f"{architecture}."

    def full_name(self, name: str) -> str:
        return self._prefix + name

    def get(self, name: str) -> Any:
        return self._found.get(self._prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not is_whole(value) or value < 1:
            raise _Unfit(f"{self._prefix}{name} is {_shown(value)}, where a positive whole number is needed")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not is_number(value) or not 0 < value < float("inf"):
            raise _Unfit(f"{self._prefix}{name} is {_shown(value)}, where a positive number is needed")
        return float(f"{value:.7g}")  # float32 in the file: 1e-06 as it was meant

    def refuse(self, name: str, *fine: Any) -> None:
        value = self.get(name)
        if value is not None and not any(_equal(value, each) for each in fine):
            raise _Unfit(f"{self._prefix}{name} is {_shown(value)}, which is not supported here")


def _fields(own: _Metadata, header: GGUFHeader, family: GGUFFamily) -> dict[str, Any]:
    """Return the fields of config.json, those of RoPE in transformers 4's words, which 5 knows as well."""
    if EMBEDDING not in header.tensors or len(header.tensors[EMBEDDING].shape) != 2:
        raise _Unfit(f"it has no matrix {EMBEDDING}")
    own.refuse("expert_count", 0)
    heads, hidden = own.count("attention.head_count"), own.count("embedding_length")
    head_dim = own.count("attention.key_length", max(1, hidden // heads))
    own.refuse("attention.value_length", head_dim)
    own.refuse("rope.dimension_count", head_dim)
    own.refuse("attention.causal", True)
    fields: dict[str, Any] = {
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": own.count("feed_forward_length"),
        "num_hidden_layers": _num_layers(own, header),
        "num_attention_heads": heads,
        "num_key_value_heads": own.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own.count("context_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": own.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(own, header, head_dim),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header, family),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token: Any = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        fields[f"{name}_token_id"] = int(token) if is_whole(token) and 0 <= token < fields["vocab_size"] else None
    if family.name == "gemma3":
        return fields | _gemma3_fields(own, fields)
    own.refuse("attention.sliding_window", 0)
    own.refuse("attention.scale", 0.0, head_dim**-0.5)
    if family.name == "llama":
        fields["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    return fields


def _num_layers(own: _Metadata, header: GGUFHeader) -> int:
    """Return how many layers there are, no more than there are tensors of: configs have a list of them."""
    layers = own.count("block_count")
    parts = [name.split(".") for name in header.tensors]
    found = len({part[1] for part in parts if len(part) > 2 and part[0] == "blk" and part[1].isdecimal()})
    if layers > found:
        raise _Unfit(f"{own.full_name('block_count')} is {layers}, but the file has tensors of {found} layers")
    return layers


def _gemma3_fields(own: _Metadata, fields: dict[str, Any]) -> dict[str, Any]:
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


def _rope_scaling(own: _Metadata, header: GGUFHeader, head_dim: int) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type")
    own.refuse("rope.scaling.attn_factor", 1.0)  # by which llama.cpp multiplies cosines and sines
    # An old file has its factor elsewhere. llama.cpp takes a factor without a type for linear, and 0 for none.
    factor = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if own.get(name) is not None), None)
    if ROPE_FACTORS in header.tensors:
        own.refuse("rope.scaling.type", "none")
        if kind is None and factor is not None:
            own.refuse(factor, 0.0, 1.0)
        return _llama3_scaling(own, header, head_dim)
    if kind is None:
        kind = "none" if factor is None or own.get(factor) in (0.0, 1.0) else "linear"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise _Unfit(f"rope.scaling.type is {_shown(kind)}: 'linear' and 'yarn' can be read")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": own.number(factor or "rope.scaling.factor")}
    if kind == "yarn":
        for name in ("yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor", "yarn_ext_factor"):
            own.refuse(f"rope.scaling.{name}")
        scaling["original_max_position_embeddings"] = own.count("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(own: _Metadata, header: GGUFHeader, head_dim: int) -> dict[str, Any] | None:
    """Return the scaling of which a file has what llama.cpp made of it: a factor for each frequency."""
    place = header.tensors[ROPE_FACTORS]
    if place.shape != (head_dim // 2,):
        raise _Unfit(f"{ROPE_FACTORS} has the shape {place.shape}, where ({head_dim // 2},) is needed")
    factors = read_tensor(header, place).double().numpy()
    if np.all(factors == 1):
        return None
    factor = float(f"{factors.max():.7g}")
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if not np.allclose(factors, _llama3_factors(own.number("rope.freq_base", 10000.0), head_dim, factor), rtol=1e-4):
        raise _Unfit(f"{ROPE_FACTORS} are not those of Llama 3.1's scaling of RoPE by {factor}")
    return {"rope_type": "llama3", "original_max_position_embeddings": LLAMA3_LENGTH, **scaling}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return what Llama 3.1 divides each frequency by: nothing for waves shorter than a quarter of the length that it
    was trained on, `factor` for those longer than all of it, and between them what blends the two frequencies."""
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept = (LLAMA3_LENGTH / waves - 1) / (4 - 1)
    return np.asarray(1 / (np.clip(kept, 0, 1) + (1 - np.clip(kept, 0, 1)) / factor))


def _dtype(header: GGUFHeader, family: GGUFFamily) -> torch.dtype:
    """Return the dtype of the model: that of its matrices, or half precision for quantized ones."""
    kinds = {place.kind for place in header.tensors.values() if len(place.shape) == 2}
    if kinds <= FULL_PRECISION:
        return torch.float32
    return torch.bfloat16 if family.overflows_float16 or kinds <= {*FULL_PRECISION, BF16} else torch.float16


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]
