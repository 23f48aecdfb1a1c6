"""Says whether ranks can share a model. Its config alone tells, so no rank has to be started for the answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_blend.distributed.ranks import Ranks
from vllm_blend.distributed.sharding import equal_share
from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec
from vllm_blend.models.registry import resolve_model_class


def check_ranks_fit(hf_config: Any, size: int) -> None:
    """Raise ValueError if `size` ranks cannot share the model that `hf_config` describes, and name the numbers of ranks
    that can. Several ranks are also refused what cannot be loaded at all: an unknown architecture, or a config that
    contradicts itself."""
    if size == 1:
        return
    model_class = resolve_model_class(hf_config)
    if not issubclass(model_class, DecoderForCausalLM):
        raise ValueError(
            f"tensor_parallel_size={size}: {model_class.__name__} does not derive from DecoderForCausalLM, whose "
            "layers ranks can share; give tensor_parallel_size=1"
        )
    spec = model_class.spec(hf_config)
    problem = _misfit(spec, size)
    if problem is not None:
        fitting = [str(n) for n in range(1, spec.num_heads + 1) if _misfit(spec, n) is None]
        raise ValueError(f"tensor_parallel_size={size}: {problem}; give one that fits this model: {', '.join(fitting)}")


def _misfit(spec: DecoderSpec, size: int) -> str | None:
    """Return which of a model's sizes `size` ranks cannot share; None if they can share all."""
    share, experts = replace(spec, ranks=Ranks(0, size)), spec.experts
    try:
        _ = share.heads, share.kv_heads
        if experts is None or len(experts.layers) < spec.num_layers:
            equal_share("intermediate_size", spec.intermediate_size, share.ranks)
        if experts is not None:
            equal_share("experts' intermediate size", experts.intermediate_size, share.ranks)
    except ValueError as error:
        return str(error)
    return None
