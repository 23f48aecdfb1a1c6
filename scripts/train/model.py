"""The demo model as plain PyTorch: a Llama with grouped-query attention and tied embeddings, for whole sequences.

It exists to be trained. `save_pretrained` writes it in Hugging Face format, which everything else loads.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 2048
    hidden_size: int = 384
    num_layers: int = 12
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 1024

    def to_hf(self) -> dict[str, object]:
        """Return the fields of a Llama `config.json`, for transformers 5 (`rope_parameters`, `dtype`) and 4."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


def rope_table(length: int, config: ModelConfig, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each [length, 1, head_dim] float32, halves repeated."""
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    angles = torch.arange(length, device=device).float()[:, None] / config.rope_theta**exponents
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [batch, tokens, heads, head_dim] in float32 and cast back."""
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            projection(x).view(*x.shape[:-1], -1, self.config.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DemoModel(nn.Module):
    """The model: forward(ids [batch, tokens] int64) returns logits [batch, tokens, vocab]. Parameter names are Hugging
    Face's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # GPT-2's rule: layers that write to the residual stream start smaller, the more of them there are.
                writes = "o_proj" in name or "down_proj" in name
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * config.num_layers) if writes else 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        cos, sin = rope_table(ids.shape[1], self.config, ids.device)
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def save_pretrained(model: DemoModel, output_dir: Path, tokenizer_dir: Path) -> None:
    """Write weights (bf16), configuration and tokenizer as a Hugging Face model directory."""
    output_dir.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{k}": v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(weights, output_dir / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_hf()
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (output_dir / "config.json").write_text(json.dumps(config, indent=1))
    (output_dir / "generation_config.json").write_text(json.dumps(special))
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_dir / name, output_dir / name)
