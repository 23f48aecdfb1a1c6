"""Gemma 3 (Gemma team, 2025), text models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm_blend.distributed.ranks import ONE_RANK, Ranks
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.models.decoder import DecoderForCausalLM, DecoderSpec, SelfAttention, attention_biases, make_mlp


class GemmaRMSNorm(nn.Module):
    """RMSNorm that multiplies by 1 + weight, in float32: in bfloat16 the sum would lose most of the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., size]."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + self.weight.float())).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return norm(x + residual) and x + residual."""
        residual = x + residual
        return self(residual), residual


class Gemma3Attention(SelfAttention):
    """Self-attention that normalises each head of Q and K by a `GemmaRMSNorm`."""

    q_norm: Any
    k_norm: Any

    def __init__(self, spec: DecoderSpec, layer_idx: int, rotary: RotaryEmbedding) -> None:
        super().__init__(spec, layer_idx, rotary)
        self.q_norm, self.k_norm = (GemmaRMSNorm(spec.head_dim, spec.rms_norm_eps) for _ in range(2))

    def normalize(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Normalise each head of Q and K."""
        size = self.attn.head_dim
        q, k = q.unflatten(-1, (q.shape[-1] // size, size)), k.unflatten(-1, (k.shape[-1] // size, size))
        return self.q_norm(q).flatten(-2), self.k_norm(k).flatten(-2), None


class Gemma3Layer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, spec: DecoderSpec, layer_idx: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        self.self_attn = Gemma3Attention(spec, layer_idx, rotary)
        self.mlp = make_mlp(spec, layer_idx)
        self.input_layernorm, self.post_attention_layernorm = GemmaRMSNorm(size, eps), GemmaRMSNorm(size, eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(size, eps)
        self.post_feedforward_layernorm = GemmaRMSNorm(size, eps)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `hidden` to `residual` (None in the first layer) and run the layer, as `DecoderLayer` does."""
        residual = hidden if residual is None else hidden + residual
        attended, rows = self.self_attn(self.input_layernorm(residual))
        if rows is not None:
            residual = residual[rows]
        residual = residual + self.post_attention_layernorm(attended)
        return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(residual))), residual


class Gemma3ForCausalLM(DecoderForCausalLM):
    """A decoder whose layers mostly see a window, with RoPE of another base; GELU, four norms a layer."""

    serves = "Gemma 3 of text alone (270M, 1B)"
    windows = "most layers"
    layer = Gemma3Layer
    norm = GemmaRMSNorm
    takes_quantization = False

    def __init__(
        self, hf_config: Any, max_position: int, quantization: str | None = None, ranks: Ranks = ONE_RANK
    ) -> None:
        super().__init__(hf_config, max_position, quantization, ranks)
        self.softcap: float | None = getattr(hf_config, "final_logit_softcapping", None)

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        for field in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if getattr(hf_config, field, None):
                raise ValueError(f"{field}={getattr(hf_config, field)!r} in the model's config is not supported")
        activation = hf_config.hidden_activation
        if activation != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_activation {activation!r} is not supported: Gemma 3 has 'gelu_pytorch_tanh'")
        return DecoderSpec.from_hf(
            hf_config,
            layer_types=tuple(hf_config.layer_types),
            sliding_window=hf_config.sliding_window,
            attention_scale=hf_config.query_pre_attn_scalar**-0.5,
            # rounded to the model's dtype, as it was in training
            embedding_scale=float(torch.tensor(hf_config.hidden_size**0.5, dtype=torch.get_default_dtype())),
            activation="gelu_tanh",
            **attention_biases(hf_config),
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab_size] of hidden states, as `DecoderForCausalLM` does."""
        logits = super().compute_logits(hidden)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap
