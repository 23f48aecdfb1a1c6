"""One Python function per kernel. Each dispatches to a compiled kernel where there is one and to plain torch otherwise."""

from vllm_blend.ops.activation import silu_and_mul
from vllm_blend.ops.cache import place_chunk, reshape_and_cache
from vllm_blend.ops.layernorm import fused_add_rms_norm, rms_norm
from vllm_blend.ops.rotary import rotary_embedding

__all__ = ["fused_add_rms_norm", "place_chunk", "reshape_and_cache", "rms_norm", "rotary_embedding", "silu_and_mul"]
