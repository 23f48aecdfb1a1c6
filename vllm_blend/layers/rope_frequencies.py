"""RoPE frequencies: what a Hugging Face config says about its rotation, and the angles that follow from it.

One function a type. The parameters are read from transformers 5 configs (`rope_parameters`, flat or one dict per layer
type) and from transformers 4 ones (`rope_theta` beside `rope_scaling`, whose type is called "type" or "rope_type").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

NO_ROPE = "none"  # the type of layers without RoPE, which no config names


@dataclass(frozen=True)
class RopeSpec:
    """Everything the rotation at a position depends on. Fields that a type does not use are None."""

    rope_type: str
    rotary_dim: int  # leading channels of a head that rotate
    theta: float  # the base; for "dynamic" the enlarged one
    factor: float | None = None  # context extension
    original_max_position: int | None = None  # context length before the extension, in tokens
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None  # multiplies cos and sin
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    divisors: tuple[float, ...] | None = None  # of the frequencies, one a channel pair

    def fingerprint(self) -> str:
        """Return a stable text with every parameter in use: part of the key of cached chunks."""
        values = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "rope_type"]
        return f"{self.rope_type}({','.join(f'{name}={value!r}' for name, value in values if value is not None)})"

    def inverse_frequencies(self) -> torch.Tensor:
        """Return the angle per position of each channel pair, [rotary_dim / 2] float32 on the CPU."""
        if self.rope_type == NO_ROPE:
            return torch.zeros(self.rotary_dim // 2, device="cpu")
        return ROPE_TYPES[self.rope_type](self)


def _powers(spec: RopeSpec) -> torch.Tensor:
    """Return the base to the power that each channel pair has: the default frequencies are one over these."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device="cpu") / spec.rotary_dim
    return spec.theta**exponents


def _default(spec: RopeSpec) -> torch.Tensor:
    """Return the frequencies of RoFormer (Su et al., 2021), section 3.2.2."""
    return 1.0 / _powers(spec)


def _linear(spec: RopeSpec) -> torch.Tensor:
    """Interpolate positions (Chen et al., 2023): divide every angle by the factor."""
    assert spec.factor is not None
    return _default(spec) / spec.factor


def _llama3(spec: RopeSpec) -> torch.Tensor:
    """Scale as Llama 3.1 does: keep short waves, divide long ones by the factor, blend linearly between the bands."""
    assert spec.factor and spec.original_max_position and spec.low_freq_factor and spec.high_freq_factor
    frequencies = _default(spec)
    turns = spec.original_max_position * frequencies / (2 * math.pi)  # full turns within the original context
    kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / spec.factor)


def _yarn(spec: RopeSpec) -> torch.Tensor:
    """Scale as YaRN does (Peng et al., 2023, section 3.2): interpolate slow channel pairs, keep fast ones, and ramp
    between them over the pairs' indices."""
    assert spec.factor and spec.original_max_position and spec.beta_fast and spec.beta_slow
    frequencies = _default(spec)
    context, base = spec.original_max_position, math.log(spec.theta)

    def channel_with_turns(turns: float) -> float:
        return spec.rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * base)

    low, high = channel_with_turns(spec.beta_fast), channel_with_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low or 0.001  # equal bounds: a step instead of a division by zero
    pairs = torch.arange(spec.rotary_dim // 2, dtype=torch.float32, device="cpu")
    interpolated = ((pairs - low) / width).clamp(0, 1)
    return frequencies / spec.factor * interpolated + frequencies * (1 - interpolated)


def _longrope(spec: RopeSpec) -> torch.Tensor:
    """Scale as LongRoPE does (Ding et al., 2024): divide every frequency by a number of its own."""
    assert spec.divisors
    return 1.0 / (torch.tensor(spec.divisors, dtype=torch.float32, device="cpu") * _powers(spec))


ROPE_TYPES: dict[str, Callable[[RopeSpec], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # its whole effect is a larger base, resolved in rope_spec
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def rope_spec(hf_config: Any, max_position: int, layer_type: str | None = None) -> RopeSpec:
    """Read the RoPE of `hf_config` for positions below `max_position`.

    `layer_type` ("full_attention", ...) picks the entry when the config has one dict per layer type. Raises ValueError
    for an unknown type and for missing or senseless parameters.

    Dynamic NTK makes the base depend on the longest sequence seen. Rotated keys stay in a paged cache that requests of
    any length share, so the base must not move: it is the one for `max_position` tokens, and the original base when
    `max_position` does not exceed the original context. That equals Hugging Face's within the original context and at
    `max_position` tokens.

    LongRoPE has two sets of frequencies, and Hugging Face takes the long ones for sequences above the original context.
    For the same reason all sequences get the same set here, as in vLLM: the long one if `max_position` is above the
    original context, the short one otherwise. That equals Hugging Face's for all sequences that are longer than the
    original context, and for all others if `max_position` does not exceed it.
    """
    raw = _raw_parameters(hf_config, layer_type)
    rope_type = raw["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"unknown RoPE type {rope_type!r} in the model's config; known: {', '.join(sorted(ROPE_TYPES))}"
        )
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    rotary_dim = int(head_dim * raw["partial_rotary_factor"])
    if rotary_dim <= 0 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"RoPE needs an even number of channels up to head_dim ({head_dim}), got {rotary_dim}")
    theta = float(raw["rope_theta"])
    if rope_type == "default":
        return RopeSpec(rope_type, rotary_dim, theta)

    context, original = _contexts(hf_config, raw)
    factor = raw.get("factor")
    if factor is None and rope_type in ("yarn", "longrope"):
        factor = context / original
    factor = _number("factor", factor, rope_type)
    if rope_type == "linear":
        return RopeSpec(rope_type, rotary_dim, theta, factor)
    if rope_type == "dynamic":
        growth = factor * max(max_position, context) / context - (factor - 1)
        return RopeSpec(rope_type, rotary_dim, theta * growth ** (rotary_dim / max(rotary_dim - 2, 1)))
    extended = RopeSpec(rope_type, rotary_dim, theta, factor, original)
    if rope_type == "llama3":
        low = _number("low_freq_factor", raw.get("low_freq_factor"), rope_type)
        high = _number("high_freq_factor", raw.get("high_freq_factor"), rope_type)
        if high <= low:
            raise ValueError(f"RoPE high_freq_factor ({high}) must be above low_freq_factor ({low})")
        return replace(extended, low_freq_factor=low, high_freq_factor=high)
    if rope_type == "longrope":
        sets = {name: _divisors(name, raw.get(name), rotary_dim) for name in ("short_factor", "long_factor")}
        return replace(
            extended,
            attention_factor=_longrope_attention_factor(raw, factor, original),
            divisors=sets["long_factor" if max_position > original else "short_factor"],
        )
    return replace(
        extended,
        attention_factor=_yarn_attention_factor(raw, factor),
        beta_fast=float(raw.get("beta_fast") or 32),
        beta_slow=float(raw.get("beta_slow") or 1),
        truncate=bool(raw.get("truncate", True)),
    )


def _yarn_attention_factor(raw: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's equation 15, or DeepSeek's ratio of two such terms if the config has mscale and mscale_all_dim."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if raw.get("attention_factor") is not None:
        return float(raw["attention_factor"])
    if raw.get("mscale") and raw.get("mscale_all_dim"):
        return temperature(raw["mscale"]) / temperature(raw["mscale_all_dim"])
    return temperature(1.0)


def _longrope_attention_factor(raw: Mapping[str, Any], factor: float, original: int) -> float:
    """Return LongRoPE's temperature by the growth of the context, or what the config gives."""
    if raw.get("attention_factor") is not None:
        return _number("attention_factor", raw["attention_factor"], "longrope")
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _divisors(name: str, values: Any, rotary_dim: int) -> tuple[float, ...]:
    """Check LongRoPE's list `name` of a config: a positive number for each channel pair."""
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != rotary_dim // 2:
        given = f"{len(values)} of them" if isinstance(values, Sequence) else repr(values)
        raise ValueError(
            f"RoPE type 'longrope' needs {rotary_dim // 2} numbers as {name!r} in the model's config, "
            f"one a channel pair, got {given}"
        )
    return tuple(_number(name, value, "longrope") for value in values)


def context_lengths(hf_config: Any) -> tuple[int, int] | None:
    """Return the longest sequence by default and the longest that the model supports, None if its config names none.

    As in vLLM, RoPE that extends the context counts: YaRN supports its factor times the original context, which is
    `original_max_position_embeddings` whatever `max_position_embeddings` says, linear interpolation and dynamic NTK
    their factor times `max_position_embeddings`. The default is the longest that is supported, but the original context
    with LongRoPE and dynamic NTK, which rotate shorter sequences differently if longer ones are allowed.
    """
    if getattr(hf_config, "max_position_embeddings", None) is None:
        return None
    layer_types: list[str | None] = [*_by_layer_type(hf_config)] or [None]
    lengths = [_context_lengths(hf_config, _raw_parameters(hf_config, layer_type)) for layer_type in layer_types]
    return min(default for default, _ in lengths), min(longest for _, longest in lengths)


def _context_lengths(hf_config: Any, raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return `context_lengths` by the RoPE parameters of one layer type."""
    context, original = _contexts(hf_config, raw)
    rope_type = raw["rope_type"]
    if rope_type == "longrope":
        return min(original, context), context
    if rope_type not in ("yarn", "linear", "dynamic"):
        return context, context
    if rope_type == "yarn" and raw.get("factor") is None:
        return context, context
    extended = int((original if rope_type == "yarn" else context) * _number("factor", raw.get("factor"), rope_type))
    return context if rope_type == "dynamic" else extended, extended


def _contexts(hf_config: Any, raw: Mapping[str, Any]) -> tuple[int, int]:
    """Return max_position_embeddings, and the original context, which some configs name outside their parameters."""
    context = int(hf_config.max_position_embeddings)
    name = "original_max_position_embeddings"
    original = getattr(hf_config, name, None) or raw.get(name) or context
    return context, int(_number(name, original, raw["rope_type"]))


_MAX_PARAMETER = 1e30  # frequencies are computed in 32 bits


def _number(name: str, value: Any, rope_type: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_PARAMETER:
        raise ValueError(
            f"RoPE type {rope_type!r} needs a positive {name!r} of at most {_MAX_PARAMETER:g} in the model's config, "
            f"got {value!r}"
        )
    return float(value)


def _raw_parameters(hf_config: Any, layer_type: str | None) -> dict[str, Any]:
    """Return the config's RoPE parameters as one flat dict that has rope_type, rope_theta and partial_rotary_factor."""
    found = _found_parameters(hf_config)
    by_layer_type = _by_layer_type(hf_config)
    if by_layer_type:
        if layer_type not in by_layer_type:
            raise ValueError(
                f"the model's config has RoPE for {sorted(by_layer_type)} layers, not for {layer_type!r} ones"
            )
        found = by_layer_type[layer_type]
    raw = dict(found)
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    raw["rope_type"] = "longrope" if rope_type == "su" else rope_type  # its first name
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        value = raw.get(name)
        if value is None:
            value = getattr(hf_config, name, None)
        raw[name] = _number(name, default if value is None else value, raw["rope_type"])
    return raw


def _found_parameters(hf_config: Any) -> Mapping[str, Any]:
    found = getattr(hf_config, "rope_parameters", None)
    if found is None:
        found = getattr(hf_config, "rope_scaling", None)
    return found or {}


def _by_layer_type(hf_config: Any) -> dict[str, Mapping[str, Any]]:
    """Return the config's RoPE parameters by layer type; empty if all layers have the same."""
    return {key: value for key, value in _found_parameters(hf_config).items() if isinstance(value, Mapping)}
