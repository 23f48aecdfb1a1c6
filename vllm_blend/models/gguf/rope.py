"""The scaling of RoPE in a GGUF file, as config.json states it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vllm_blend.models.gguf.header import GGUFHeader
from vllm_blend.models.gguf.metadata import Metadata, UnfitFile, shown
from vllm_blend.models.gguf.tensors import read_tensor

LLAMA3_FACTORS = "rope_freqs.weight"  # what llama.cpp divides the frequencies by, in place of Llama 3's scaling
LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
LLAMA3_LENGTH = 8192  # on which Llama 3's scaling builds; a GGUF file has only what follows from it


def rope_scaling(own: Metadata, header: GGUFHeader, rotary_dim: int) -> dict[str, Any] | None:
    """Return the scaling, None if there is none. Raises UnfitFile naming what cannot be read."""
    if any(name in header.tensors for name in LONGROPE_FACTORS.values()):
        return _longrope(own, header, rotary_dim)
    kind = own.get("rope.scaling.type")
    own.refuse("rope.scaling.attn_factor", 1.0)  # by which llama.cpp multiplies cosines and sines
    # An old file has its factor elsewhere. llama.cpp takes a factor without a type for linear, and 0 for none.
    factor = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if own.get(name) is not None), None)
    if LLAMA3_FACTORS in header.tensors:
        own.refuse("rope.scaling.type", "none")
        if kind is None and factor is not None:
            own.refuse(factor, 0.0, 1.0)
        return _llama3(own, header, rotary_dim)
    if kind is None:
        kind = "none" if factor is None or own.get(factor) in (0.0, 1.0) else "linear"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnfitFile(f"rope.scaling.type is {shown(kind)}: 'linear', 'yarn' and 'longrope' with factors can be read")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": own.number(factor or "rope.scaling.factor")}
    return scaling if kind == "linear" else scaling | _yarn(own)


def _yarn(own: Metadata) -> dict[str, Any]:
    for name in ("yarn_attn_factor", "yarn_ext_factor"):
        own.refuse(f"rope.scaling.{name}", 1.0)
    scaling: dict[str, Any] = {
        "original_max_position_embeddings": own.count("rope.scaling.original_context_length"),
        "beta_fast": own.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": own.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if own.get("rope.scaling.yarn_log_multiplier") is not None:  # a file has one of two, which are equal
        multiplier = own.number("rope.scaling.yarn_log_multiplier")
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return scaling


def _longrope(own: Metadata, header: GGUFHeader, rotary_dim: int) -> dict[str, Any]:
    """Return Phi-3's scaling, whose factors of cosines and sines follow from the growth of the context."""
    own.refuse("rope.scaling.type", "longrope")
    length, context = own.count("rope.scaling.original_context_length"), own.count("context_length")
    growth = context / length
    own.refuse("rope.scaling.attn_factor", math.sqrt(1 + math.log(growth) / math.log(length)) if growth > 1 else 1.0)
    factors = {
        name: [float(f"{value:.7g}") for value in _factors(header, place, rotary_dim)]
        for name, place in LONGROPE_FACTORS.items()
    }
    return {"rope_type": "longrope", "original_max_position_embeddings": length, **factors}


def _factors(header: GGUFHeader, name: str, rotary_dim: int) -> np.ndarray:
    place = header.tensors.get(name)
    if place is None or place.shape != (rotary_dim // 2,):
        found = "missing" if place is None else f"of the shape {place.shape}"
        raise UnfitFile(f"{name} is {found}, where ({rotary_dim // 2},) is needed")
    return np.asarray(read_tensor(header, place).double().numpy())


def _llama3(own: Metadata, header: GGUFHeader, head_dim: int) -> dict[str, Any] | None:
    """Return the scaling of which a file has what llama.cpp made of it: a factor for each frequency."""
    factors = _factors(header, LLAMA3_FACTORS, head_dim)
    if np.all(factors == 1):
        return None
    factor = float(f"{factors.max():.7g}")
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if not np.allclose(factors, _llama3_factors(own.number("rope.freq_base", 10000.0), head_dim, factor), rtol=1e-4):
        raise UnfitFile(f"{LLAMA3_FACTORS} are not those of Llama 3.1's scaling of RoPE by {factor}")
    return {"rope_type": "llama3", "original_max_position_embeddings": LLAMA3_LENGTH, **scaling}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return what Llama 3.1 divides each frequency by: nothing for waves shorter than a quarter of the length that it
    was trained on, `factor` for those longer than all of it, and between them what blends the two frequencies."""
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    kept = (LLAMA3_LENGTH / waves - 1) / (4 - 1)
    return np.asarray(1 / (np.clip(kept, 0, 1) + (1 - np.clip(kept, 0, 1)) / factor))
