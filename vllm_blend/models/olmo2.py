"""OLMo 2 (OLMo team, 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_blend.distributed.ranks import Ranks
from vllm_blend.distributed.sharding import Layout, Share, kv_head_copies, row_layout
from vllm_blend.layers.layernorm import RMSNorm
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, SelfAttention, attention_biases, make_mlp


class SharedRMSNorm(RMSNorm):
    """RMSNorm over heads of which this rank has a share; `copies` ranks have each of them."""

    def __init__(self, share: Share, eps: float, ranks: Ranks, copies: int = 1) -> None:
        super().__init__(share.count, eps)
        self.share, self.ranks, self.copies = share, ranks, copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [rows, share.count], by all ranks' parts of each row."""
        if self.ranks.size == 1:
            return super().forward(x)
        wide = x.float()
        squares = self.ranks.sum(wide.square().sum(-1, keepdim=True)) / (self.copies * self.share.total)
        return (wide * torch.rsqrt(squares + self.eps)).to(x.dtype) * self.weight

    def layouts(self) -> dict[str, Layout]:
        """Return the layout of the weight, if this is one rank's share of it."""
        return {} if self.share.is_whole else {"weight": row_layout([self.share], self.weight.detach())}


class Olmo2Attention(SelfAttention):
    """Self-attention that normalises all of Q and all of K, not each head."""

    def __init__(self, spec: DecoderSpec, layer_idx: int, rotary: RotaryEmbedding) -> None:
        super().__init__(spec, layer_idx, rotary)
        eps, ranks = spec.rms_norm_eps, spec.ranks
        copies = kv_head_copies(spec.num_kv_heads, ranks)
        self.q_norm = SharedRMSNorm(spec.heads.times(spec.head_dim), eps, ranks)
        self.k_norm = SharedRMSNorm(spec.kv_heads.times(spec.head_dim), eps, ranks, copies)

    def normalize(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Normalise Q and K, each over all of its heads together."""
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(q), self.k_norm(k), None


class Olmo2Layer(nn.Module):
    """Attention and MLP, each with a norm behind it instead of before it."""

    def __init__(self, spec: DecoderSpec, layer_idx: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(spec, layer_idx, rotary)
        self.mlp = make_mlp(spec, layer_idx)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `hidden` to `residual` (None in the first layer) and run the layer, as `DecoderLayer` does."""
        residual = hidden if residual is None else hidden + residual
        attended, rows = self.self_attn(residual)
        if rows is not None:
            residual = residual[rows]
        residual = residual + self.post_attention_layernorm(attended)
        return self.post_feedforward_layernorm(self.mlp(residual)), residual


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Llama with its norms after attention and MLP, and with Q and K normalised as wholes."""

    serves = "OLMo 2"
    layer = Olmo2Layer
    takes_quantization = False

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        return DecoderSpec.from_hf(hf_config, **attention_biases(hf_config))
