"""A transformers model whose attention is masked by layer and KV head, and what an engine's heads held to mask by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.engine.engines import feature
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.features.kv_compress.extension import KVCompression
from vllm_blend.features.kv_compress.state import COMPRESSION

MASKED = "masked_by_head"  # for `set_attn_implementation`
Held = dict[str, dict[int, torch.Tensor]]  # request -> query position -> [layers, kv_heads, positions] bool

visible: list[torch.Tensor] = []  # [layers, kv_heads, queries, keys] bool, for the forward pass that runs
received: list[torch.Tensor] = []  # what its keys received: by layer [heads, queries, keys]


def masked_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention of [1, heads, tokens, head_dim] under `visible`, as a transformers attention function."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    seen = visible[0][module.layer_idx].repeat_interleave(group, 0)
    probabilities = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, -math.inf).softmax(-1)
    received.append(probabilities[0])
    return (probabilities @ value).transpose(1, 2), None


AttentionInterface.register(MASKED, masked_attention)


def watch(llm: LLM) -> Held:
    """Note, after every step, which positions each head of a request in head pages held when its query was computed."""
    compression = feature(llm.llm_engine, KVCompression)
    launched, held = compression.launched, Held()

    def noting(step: Any) -> None:
        launched(step)
        for item in step.scheduled.scheduled:
            state = COMPRESSION.get(item.request)
            if state is None or state.index is None:
                continue
            _, positions = compression.cache_engine.read(compression.tables.slots_of(state.index))
            seen = torch.zeros(*positions.shape[:2], item.stop + 1, dtype=torch.bool)
            seen.scatter_(2, positions.masked_fill(positions < 0, item.stop), True)
            held.setdefault(item.request.request_id, {})[item.start] = seen[..., :-1]

    compression.launched = noting  # type: ignore[method-assign]
    return held


def answers_of(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> tuple[list[RequestOutput], Held]:
    """Return the outputs of a batch, and what each request's heads held at each of its steps."""
    held, inner = watch(llm), llm.llm_engine
    for index, ids in enumerate(prompts):
        inner.add_request(str(index), {"prompt_token_ids": ids}, params)
    outputs = []
    while inner.has_unfinished_requests():
        outputs += [output for output in inner.step() if output.finished]
    del feature(inner, KVCompression).launched
    return outputs, held


def masked_model(directory: str) -> Any:
    """Return the transformers model of a directory, in float64, with `masked_attention`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    model.set_attn_implementation(MASKED)
    return model
