"""`hf_overrides`: what a user replaces in a model's config.json, as in vLLM."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig

from vllm_blend.checks import closest
from vllm_blend.models.config_sizes import check_config_sizes

HfOverrides = dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig]
_ROPE = ("rope_scaling", "rope_theta", "partial_rotary_factor")  # names of transformers 4, part of rope_parameters now
# names that are valid though not every config has them
_OPTIONAL = ("head_dim", "layer_types", "original_max_position_embeddings", "rope_parameters", *_ROPE)


def apply_hf_overrides(config: PretrainedConfig, overrides: HfOverrides) -> PretrainedConfig:
    """Return `config` changed by `overrides`: merged dict by dict, or what a function makes of it.

    Raises ValueError for a name that the config does not have, for values that transformers refuses, and for a function
    that fails or returns something else. Sizes are checked afterwards (`check_config_sizes`).
    """
    if not isinstance(overrides, Mapping):
        return _called(config, overrides)
    fields = config.to_dict()
    for name in overrides:
        if name not in fields and name not in _OPTIONAL:
            meant = closest(name, [*fields, *_OPTIONAL])
            hint = f": did you mean {meant!r}?" if meant else ""
            raise ValueError(f"hf_overrides: the model's config has no {name!r}{hint}")
    merged: dict[str, Any] = {}
    try:
        merged = _merge(fields, _with_rope_parameters(fields, overrides))
        return type(config).from_dict(merged)
    except Exception as error:  # transformers raises a type of its own for every kind of bad field
        check_config_sizes(merged, f"the config with hf_overrides={overrides!r}")
        raise ValueError(f"hf_overrides={overrides!r} make no usable config: {error}") from error


def _called(config: PretrainedConfig, function: Callable[[PretrainedConfig], PretrainedConfig]) -> PretrainedConfig:
    try:
        changed = function(copy.deepcopy(config))
    except Exception as error:  # a user's function may raise anything
        raise ValueError(f"the function in hf_overrides failed: {error!r}") from error
    if not isinstance(changed, PretrainedConfig):
        raise ValueError(f"the function in hf_overrides returned {changed!r}: return the changed config")
    return changed


def _with_rope_parameters(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `overrides` with the RoPE settings that have names of their own moved into rope_parameters."""
    moved = {name: value for name, value in overrides.items() if name not in _ROPE}
    flat = dict(overrides.get("rope_scaling") or {})
    flat |= {name: overrides[name] for name in ("rope_theta", "partial_rotary_factor") if name in overrides}
    if "type" in flat:
        flat["rope_type"] = flat.pop("type")
    if flat:
        by_layer_type = [key for key, value in (fields.get("rope_parameters") or {}).items() if isinstance(value, dict)]
        if by_layer_type:
            raise ValueError(f"RoPE differs by layer type here: give rope_parameters for {', '.join(by_layer_type)}")
        moved["rope_parameters"] = _merge(flat, moved.get("rope_parameters") or {})
    return moved


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`, in which a dict changes the entries of a dict that it names."""
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[name] = _merge(old, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged
