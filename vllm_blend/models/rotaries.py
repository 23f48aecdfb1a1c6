"""The rotary embeddings of a decoder's layers, which share their tables where they can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm_blend.layers.rope_frequencies import NO_ROPE, RopeSpec, rope_spec
from vllm_blend.layers.rotary import RotaryEmbedding


def rotaries_by_layer_type(hf_config: Any, max_position: int, layer_types: Iterable[str]) -> dict[str, RotaryEmbedding]:
    """Return the rotary embedding of each layer type in use.

    Types with the same parameters share one instance and its tables.
    """
    specs = {kind: rope_spec(hf_config, max_position, kind) for kind in dict.fromkeys(layer_types)}
    built = {spec: RotaryEmbedding(spec, max_position) for spec in dict.fromkeys(specs.values())}
    return {kind: built[spec] for kind, spec in specs.items()}


def rotaries_by_layer(
    hf_config: Any, max_position: int, layer_types: Sequence[str], rotates: Sequence[bool] | None, head_dim: int
) -> list[RotaryEmbedding]:
    """Return the rotary embedding of each layer; one that turns nothing for layers without RoPE, which `rotates` tells
    (None: all layers have it)."""
    turns = rotates or (True,) * len(layer_types)
    kinds = [kind for kind, turned in zip(layer_types, turns, strict=True) if turned]
    built = rotaries_by_layer_type(hf_config, max_position, kinds)
    if all(turns):
        return [built[kind] for kind in layer_types]
    rotary_dim = next((rotary.spec.rotary_dim for rotary in built.values()), head_dim)
    still = RotaryEmbedding(RopeSpec(NO_ROPE, rotary_dim, 1.0), max_position)
    return [built[kind] if turned else still for kind, turned in zip(layer_types, turns, strict=True)]
