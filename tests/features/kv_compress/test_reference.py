"""Answers after evictions are those of transformers with what was evicted masked, by layer, head and step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.compare import check_entries
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, tiny_model
from tests.features.kv_compress.masked import answers_of, masked_model, received, visible

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


@pytest.mark.parametrize("metric", ["kv_compress", "keydiff", "random"])
@pytest.mark.parametrize(("architecture", "backend"), [("llama", "auto"), ("qwen3", "torch_native"), ("qwen2", "auto")])
def test_logprobs(architecture: str, backend: str, metric: str) -> None:
    model = tiny_model(architecture)
    with engine(model, **SETTINGS, kvc_metric=metric, attention_backend=backend) as llm:
        outputs, held = answers_of(llm, PROMPTS, greedy(24, logprobs=3, ignore_eos=True))
    reference = masked_model(model)
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        n, prompt = len(ids), len(output.prompt_token_ids)
        noted = held[output.request_id]
        assert sorted(noted) == list(range(prompt, n))
        layers, heads = next(iter(noted.values())).shape[:2]
        seen_by = torch.ones(n, n, dtype=torch.bool).tril().expand(layers, heads, n, n).clone()
        for position, seen in noted.items():
            assert seen[..., position].all(), "a query sees its own key"
            seen_by[:, :, position] = False
            seen_by[:, :, position, : position + 1] = seen
        assert not seen_by[:, :, -1].all(), "something was evicted"
        visible[:], received[:] = [seen_by], []
        with torch.inference_mode():
            logprobs = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
        logged = output.outputs[0].logprobs
        assert logged is not None
        check_entries(logged, output.outputs[0].token_ids, logprobs[prompt - 1 :])
