"""Tiny random checkpoints of every supported architecture, and a paged cache to run them in."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests import settings, tolerances
from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.attention.registry import make_backend
from vllm_blend.models.loader import load_hf_config, load_model
from vllm_blend.ops.paged_kv import PagedKV

VOCAB_SIZE, CONTEXT = 97, 96
HEAD_DIM = settings.current().head_dim
DEVICE, DTYPE = settings.current().torch_device, settings.current().torch_dtype
BACKEND = "torch_native" if settings.current().device == "cpu" else settings.current().attention_backend
ARCHITECTURES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_GEMMA3 = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12,
    "query_pre_attn_scalar": 3,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
    "pad_token_id": 0,
}
_GPT_OSS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,  # which these weights reach
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "truncate": False,
    },
    "pad_token_id": 0,
}
_GRANITE = {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0}
_QWEN3_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.7,
}
# Families that differ from those above in one trait each, and the fields that make it visible.
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _GEMMA3),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, _GPT_OSS),
    "granite": (GraniteConfig, GraniteForCausalLM, _GRANITE),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM, {"rope_parameters": _MINISTRAL3_ROPE, "pad_token_id": 0}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"partial_rotary_factor": 0.75, "pad_token_id": 0}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, _QWEN3_MOE),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
}


def tiny_hf_model(architecture: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 model of three layers whose weights are large enough for attention to be far from uniform.

    The weights can be represented in the dtype of the run: what differs then is the arithmetic alone.
    """
    config_class, model_class, traits = FAMILIES.get(architecture) or (*ARCHITECTURES[architecture], {})
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    model: PreTrainedModel = model_class(config_class(**(fields | traits | overrides))).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if "norm" in name else 0.2)
            parameter.copy_(parameter.to(DTYPE))
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":  # older versions of transformers have fixed numbers here
            fixed: Any = module
            fixed.limit, fixed.alpha = model.config.swiglu_limit, getattr(model.config, "swiglu_alpha", 1.702)
    return model


def save(model: PreTrainedModel, directory: Path, **options: Any) -> str:
    model.save_pretrained(directory, **options)
    return str(directory)


def check_logits(model: Any, hf_model: PreTrainedModel, length: int, *schedules: Sequence[int]) -> torch.Tensor:
    """Fail unless our model gives the logits [tokens, vocab] that transformers' model gives in float32 for a prompt of
    `length` tokens, which is computed in chunks of each of the `schedules`. Return transformers' logits.

    In another dtype than float32 ours have to be about as near to those as transformers' own in that dtype, for one of
    three prompts: where a router's choice is nearly a tie, rounding alone changes all tokens from there on.
    """
    exact = settings.current().exact
    prompts = [prompt(length, seed) for seed in ([1] if exact else [1, 2, 3])]
    expected = [hf_logits(hf_model, ids) for ids in prompts]
    assert expected[0].std() > 0.5, "logits near zero would hide errors"
    rounded: list[torch.Tensor] = []
    if not exact:
        low: Any = copy.deepcopy(hf_model).to(DEVICE, DTYPE)  # type: ignore[arg-type]  # the annotation lacks both
        rounded = [hf_logits(low, ids.to(DEVICE)).cpu() for ids in prompts]
    for chunks in schedules:
        ours = [PagedRunner(model).run(ids, chunks) for ids in prompts]
        assert [each.shape for each in ours] == [each.shape for each in expected], chunks
        if exact:
            tolerances.check("logits", ours[0] - expected[0])
        else:
            tolerances.check_one("rounding", min(map(tolerances.rounding, ours, rounded, expected)))
    return expected[0]


def edit_config(directory: str | Path, remove: Sequence[str] = (), **changes: Any) -> None:
    """Rewrite fields of a saved config.json."""
    path = Path(directory) / "config.json"
    content = json.loads(path.read_text())
    for name in remove:
        content.pop(name)
    path.write_text(json.dumps(content | changes))


def load_tiny(directory: str, max_position: int = CONTEXT, dtype: torch.dtype = DTYPE) -> Any:
    return load_model(load_hf_config(directory), directory, dtype, DEVICE, max_position=max_position)


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def hf_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids[None]).logits
    return logits[0].float()


class PagedRunner:
    """Runs a model over paged caches of NaN: a slot read before it is written shows up in the result."""

    def __init__(self, model: Any, requests: int = 1) -> None:
        self.model = model
        attention = [layer.self_attn.attn for layer in self.model.model.layers]
        dtype = self.model.lm_head.weight.dtype
        heads = (attention[0].num_heads, attention[0].num_kv_heads)
        sinks = attention[0].sinks is not None
        backend = "torch_native" if sinks else BACKEND
        self.backend = make_backend(backend, DEVICE, dtype, attention[0].head_dim, *heads, sinks=sinks)
        self.block_size = 4 if BACKEND == "torch_native" else settings.current().block_size
        blocks_each = CONTEXT // self.block_size
        shape = (requests * blocks_each, self.block_size, attention[0].num_kv_heads, attention[0].head_dim)
        empty = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        self.caches = [PagedKV(empty.clone(), empty.clone()) for _ in attention]
        shuffled = torch.randperm(shape[0], generator=torch.Generator().manual_seed(7))
        self.block_tables = shuffled.view(requests, blocks_each).int()

    def metadata(self, steps: Sequence[tuple[int, torch.Tensor]]) -> AttentionMetadata:
        """Build metadata from (first position, ids) of each request in the step; empty ids leave a request out."""
        positions, slots, offsets, lengths = [], [], [0], []
        for request, (start, ids) in enumerate(steps):
            at = torch.arange(start, start + len(ids))
            positions.append(at)
            slots.append(
                self.block_tables[request, at // self.block_size].long() * self.block_size + at % self.block_size
            )
            offsets.append(offsets[-1] + len(ids))
            lengths.append(start + len(ids))
        at, to = torch.cat(positions).to(DEVICE), torch.cat(slots).to(DEVICE)
        return AttentionMetadata(at, to, self.block_tables.to(DEVICE), offsets, lengths)

    @torch.inference_mode()
    def step(self, steps: Sequence[tuple[int, torch.Tensor]], hooks: Sequence[LayerHook] = ()) -> torch.Tensor:
        """Logits [rows, vocab] of one forward pass, on the host in float32."""
        context = ForwardContext(self.metadata(steps), self.caches, self.backend, hooks)
        with forward_context(context):
            hidden = self.model(torch.cat([ids for _, ids in steps]).to(DEVICE))
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits.cpu().float()

    def run(self, ids: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
        """Logits of one request computed in consecutive chunks of these lengths."""
        assert sum(chunks) == len(ids)
        parts, start = [], 0
        for length in chunks:
            parts.append(self.step([(start, ids[start : start + length])]))
            start += length
        return torch.cat(parts)
