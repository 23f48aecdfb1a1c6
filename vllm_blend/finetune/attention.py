"""Attention over reused chunks, exactly as reuse computes it, inside a whole-sequence forward of transformers.

A mask alone is not reuse. A reused chunk was encoded right after the prefix: its tokens saw the prefix right before
them, whereas in a masked prompt they would see it at its real distance, and could read their place in the prompt off
that distance. Reuse hides that place, which is most of what it breaks. So the scores between a chunk's tokens and the
prefix are taken at the encoding distance: the rotated query is turned back by the token's shift (rotations compose).
All other scores are right as they are: within a chunk only the difference of positions counts, and tokens that look at
chunks afterwards see their keys rotated to where they stand.

Both kinds of scores come from one call: queries [q, q turned back] against keys [k or 0, 0 or k in the prefix].

The mask is dense, or, in models loaded with `FLEX`, one of blocks for FlexAttention (Dong et al., arXiv:2412.05496),
which leaves out the blocks that no token sees: in isolated rows almost all of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PreTrainedModel

from vllm_blend.finetune.masks import Reuse, additive, sees, visible
from vllm_blend.finetune.rows import PREFIX
from vllm_blend.models.text_parts import ARCHITECTURES as TEXT_PARTS

NAME = "vllm_blend_reuse"  # among transformers' attention implementations
FLEX = NAME + "_flex"
IMPLEMENTATIONS = {"dense": NAME, "flex": FLEX}
MODEL_TYPES = ("granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")
WINDOWED_TYPES = ("mistral", "mixtral", "phi3")  # a `sliding_window` in their config is in use
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # the same frequencies at every length


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def reuse_attention(
    module: nn.Module,
    query: torch.Tensor,  # [batch, heads, length, head size], rotated
    key: torch.Tensor,  # [batch, KV heads, length, head size], rotated
    value: torch.Tensor,  # as key
    attention_mask: torch.Tensor | BlockMask | None,  # [batch, 1, length, length]; a tensor is added to the scores
    scaling: float | None = None,
    dropout: float = 0.0,
    reuse_turn: tuple[torch.Tensor, torch.Tensor] | None = None,
    reuse_prefix: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, as a function of transformers. Without the arguments of `reuse_arguments` it is ordinary
    attention."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    turned = None
    if reuse_turn is not None:  # a layer without RoPE hides places by itself
        has_rope = getattr(module, "use_rope", True)
        turned = (_rotate(query.float(), *reuse_turn) if has_rope else query).to(value.dtype)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotation leaves float32 where products are bfloat16
    if turned is not None and reuse_prefix is not None:
        query = torch.cat([query, turned], -1)
        nothing = torch.zeros((), dtype=value.dtype, device=key.device)
        key = torch.cat([torch.where(reuse_prefix, nothing, key), torch.where(reuse_prefix, key, nothing)], -1)
    if isinstance(attention_mask, BlockMask):
        attended = flex_attention(query, key, value, block_mask=attention_mask, scale=scale, enable_gqa=True)
        assert isinstance(attended, torch.Tensor)
        return attended.transpose(1, 2).contiguous(), None
    causal = attention_mask is None
    if not causal:  # with a mask, no fast kernel shares the heads of keys among those of queries
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal=causal, scale=scale, enable_gqa=causal
    )
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention known to transformers, as `attn_implementation=NAME` and `FLEX`. It may be called again."""
    for name in IMPLEMENTATIONS.values():
        AttentionInterface.register(name, reuse_attention)


def reuse_arguments(
    model: PreTrainedModel, ids: torch.Tensor, chunks: torch.Tensor, reuse: Reuse, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return keyword arguments of `model(...)`, or of its decoder, for rows that reuse `reuse`; what is returned for
    the rows' own tokens comes first.

    `ids` and `chunks` are [batch, length], see `Rows`. `dtype` is that of the scores' mask, in which attention
    computes.
    """
    flex = model.config._attn_implementation == FLEX
    angles = reuse.shift[:, None, :, None] * -model.model.rotary_emb.inv_freq.float()
    prefix = chunks.gather(1, reuse.source) == PREFIX
    return {
        "input_ids": ids.gather(1, reuse.source),
        "position_ids": reuse.source,
        "attention_mask": block_mask(chunks, reuse) if flex else additive(visible(chunks, reuse), dtype),
        "reuse_turn": (angles.cos(), angles.sin()),
        "reuse_prefix": prefix[:, None, :, None],
    }


def block_mask(chunks: torch.Tensor, reuse: Reuse) -> BlockMask:
    """Return the mask of FlexAttention for a batch. On a GPU it is made by a compiled function, as the dense one that
    it is made from would not fit the memory with longer rows."""
    rows, slots = reuse.source.shape
    make = _compiled_block_mask() if chunks.is_cuda else create_block_mask
    made: BlockMask = make(sees(chunks, reuse), rows, None, slots, slots, device=chunks.device)
    return made


@cache
def _compiled_block_mask() -> Any:
    return torch.compile(create_block_mask, dynamic=False)


def check_supported(config: Any, where: str, length: int) -> None:
    """Raise ValueError that names the field of `config.json`, for a model whose attention differs from this one in rows
    of `length` tokens."""
    parts = [name for name in config.architectures or () if name in TEXT_PARTS]
    if parts:
        raise ValueError(f"{where}: {parts[0]} is multimodal, of which only its text is served: it cannot be trained")
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"{where}: model_type is {config.model_type!r}; only {', '.join(MODEL_TYPES)} can be trained")
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ()
    windowed = config.model_type in WINDOWED_TYPES or getattr(config, "use_sliding_window", False)
    if window is not None and window < length and (windowed or "sliding_attention" in layer_types):
        raise ValueError(
            f"{where}: sliding_window is {window}, and rows have up to {length} tokens: lower --max-length to "
            f"{window}, or use a model without a window"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor is {part}: only a model that rotates whole heads can be")
    if kind not in ROPE_TYPES:
        raise ValueError(f"{where}: rope_type {kind!r} cannot be trained; use a model with {', '.join(ROPE_TYPES)}")
