"""One Python function per kernel. Each dispatches to a compiled kernel where there is one and to plain torch otherwise.

The plain torch version of `f` is `f_reference`, beside it in the same file: the kernels are tested against it.
"""

from vllm_blend.ops.activation import silu_and_mul
from vllm_blend.ops.attention import attention_mass, paged_attention
from vllm_blend.ops.cache import place_chunk, reshape_and_cache, rotary_and_cache
from vllm_blend.ops.layernorm import fused_add_rms_norm, rms_norm
from vllm_blend.ops.linear import linear
from vllm_blend.ops.rotary import rotary_embedding, rotary_qk

__all__ = [
    "attention_mass",
    "fused_add_rms_norm",
    "linear",
    "paged_attention",
    "place_chunk",
    "reshape_and_cache",
    "rms_norm",
    "rotary_and_cache",
    "rotary_embedding",
    "rotary_qk",
    "silu_and_mul",
]
