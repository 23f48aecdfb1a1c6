"""Answers after evictions are those of transformers with what was evicted masked, by layer, head and step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from tests.engine.compare import check_entries
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, tiny_model

SETTINGS: dict[str, Any] = {
    "enable_kvc": True,
    "max_cache_tokens": 16,
    "protected_window_size": 6,
    "num_sinks": 1,
    "kvc_interval": 4,
    "prefill_metric_collection_window_size": 8,
    "block_size": BLOCK_SIZE,
}
PROMPTS = [[(7 * i * i + 3 * i + start) % TINY_VOCABULARY for i in range(n)] for start, n in enumerate((50, 33, 41))]
Held = dict[str, dict[int, torch.Tensor]]  # request -> query position -> [layers, kv_heads, positions] bool

_visible: list[torch.Tensor] = []  # [layers, kv_heads, queries, keys] bool, for the forward pass that runs


def masked_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, scaling: float, **__: Any
) -> tuple[torch.Tensor, None]:
    """Attention of [1, heads, tokens, head_dim] under `_visible`, as a transformers attention function."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    seen = _visible[0][module.layer_idx].repeat_interleave(group, 0)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("masked_to_survivors", masked_attention)


def watch(llm: Any) -> Held:
    """Note, after every step, which positions each head of a request in head pages held when its query was computed."""
    compression = llm.llm_engine.kv_compression
    launched, held = compression.launched, {}

    def noting(step: Any) -> None:
        launched(step)
        for item in step.scheduled:
            state = item.request.compression
            if state is None or state.index is None:
                continue
            _, positions = compression.cache_engine.read(compression.tables.slots_of(state.index))
            seen = torch.zeros(*positions.shape[:2], item.stop + 1, dtype=torch.bool)
            seen.scatter_(2, positions.masked_fill(positions < 0, item.stop), True)
            held.setdefault(item.request.request_id, {})[item.start] = seen[..., :-1]

    compression.launched = noting
    return held


@pytest.mark.parametrize("metric", ["kv_compress", "keydiff", "random"])
@pytest.mark.parametrize(("architecture", "backend"), [("llama", "auto"), ("qwen3", "torch_native"), ("qwen2", "auto")])
def test_logprobs(architecture: str, backend: str, metric: str) -> None:
    model = tiny_model(architecture)
    with engine(model, **SETTINGS, kvc_metric=metric, attention_backend=backend) as llm:
        held = watch(llm)
        inner = llm.llm_engine
        for index, ids in enumerate(PROMPTS):
            inner.add_request(str(index), {"prompt_token_ids": ids}, greedy(24, logprobs=3, ignore_eos=True))
        outputs = []
        while inner.has_unfinished_requests():
            outputs += [output for output in inner.step() if output.finished]
        del inner.kv_compression.launched  # type: ignore[union-attr]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    reference.set_attn_implementation("masked_to_survivors")
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        n, prompt = len(ids), len(output.prompt_token_ids)
        noted = held[output.request_id]
        assert sorted(noted) == list(range(prompt, n))
        layers, heads = next(iter(noted.values())).shape[:2]
        visible = torch.ones(n, n, dtype=torch.bool).tril().expand(layers, heads, n, n).clone()
        for position, seen in noted.items():
            assert seen[..., position].all(), "a query sees its own key"
            visible[:, :, position] = False
            visible[:, :, position, : position + 1] = seen
        assert not visible[:, :, -1].all(), "something was evicted"
        _visible[:] = [visible]
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        logged = output.outputs[0].logprobs
        assert logged is not None
        check_entries(logged, output.outputs[0].token_ids, logprobs[prompt - 1 :])
