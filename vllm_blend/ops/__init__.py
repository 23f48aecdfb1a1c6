"""One Python function per kernel. Each dispatches to a compiled kernel where there is one and to plain torch otherwise.

The plain torch version of `f` is `f_reference`, beside it in the same file: the kernels are tested against it.
"""

from vllm_blend.ops.activation import gelu_tanh_and_mul, silu_and_mul
from vllm_blend.ops.attention import attention_mass, paged_attention
from vllm_blend.ops.blocks import (
    BlockMatrix,
    BlockRows,
    blocks_linear,
    blocks_rows,
    grouped_blocks_linear,
    pack_blocks,
    unpack_blocks,
)
from vllm_blend.ops.cache import HeadNorms, place_chunks, reshape_and_cache, rotary_and_cache
from vllm_blend.ops.deviation import kv_deviation
from vllm_blend.ops.fp8 import (
    fused_add_rms_norm_quant,
    quantize_rows,
    quantized_linear,
    quantized_product,
    rms_norm_quant,
    silu_and_mul_quant,
)
from vllm_blend.ops.int4 import int4_linear, pack_int4, unpack_int4
from vllm_blend.ops.int4_matrix import Int4Matrix, Int4Tiles, Int4Weight
from vllm_blend.ops.int4_tiles import pack_tiles, unpack_tiles
from vllm_blend.ops.layernorm import fused_add_rms_norm, rms_norm
from vllm_blend.ops.linear import linear
from vllm_blend.ops.mean_shift import ShiftedSegment, ShiftSources, mean_shift, plan_mean_shift
from vllm_blend.ops.penalties import penalize
from vllm_blend.ops.rotary import rotary_embedding, rotary_qk
from vllm_blend.ops.sampling import resample_tokens, sample_tokens
from vllm_blend.ops.states import attention_states, merge_states
from vllm_blend.ops.token_masks import keep_allowed
from vllm_blend.ops.transfer import HostKV, HostPieces, copy_pieces

__all__ = [
    "BlockMatrix",
    "BlockRows",
    "HeadNorms",
    "HostKV",
    "HostPieces",
    "Int4Matrix",
    "Int4Tiles",
    "Int4Weight",
    "ShiftSources",
    "ShiftedSegment",
    "attention_mass",
    "attention_states",
    "blocks_linear",
    "blocks_rows",
    "copy_pieces",
    "fused_add_rms_norm",
    "fused_add_rms_norm_quant",
    "gelu_tanh_and_mul",
    "grouped_blocks_linear",
    "int4_linear",
    "keep_allowed",
    "kv_deviation",
    "linear",
    "mean_shift",
    "merge_states",
    "pack_blocks",
    "pack_int4",
    "pack_tiles",
    "paged_attention",
    "penalize",
    "place_chunks",
    "plan_mean_shift",
    "quantize_rows",
    "quantized_linear",
    "quantized_product",
    "resample_tokens",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_quant",
    "rotary_and_cache",
    "rotary_embedding",
    "rotary_qk",
    "sample_tokens",
    "silu_and_mul",
    "silu_and_mul_quant",
    "unpack_blocks",
    "unpack_int4",
    "unpack_tiles",
]
