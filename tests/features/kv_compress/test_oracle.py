"""What an engine evicts, from the first token to the last, is what a dense float64 model of it all says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, tiny_model
from tests.features.kv_compress.masked import answers_of, masked_model, received, visible
from tests.features.kv_compress.worlds import World, expected

WINDOW, POOL, PROTECTED, SINKS, INTERVAL, BUDGET = 8, 7, 6, 1, 4, 16
SETTINGS: dict[str, Any] = {
    "enable_kvc": True,
    "max_cache_tokens": BUDGET,
    "protected_window_size": PROTECTED,
    "num_sinks": SINKS,
    "kvc_interval": INTERVAL,
    "prefill_metric_collection_window_size": WINDOW,
    "block_size": BLOCK_SIZE,
}
PROMPTS = [[(7 * i * i + 3 * i + start) % TINY_VOCABULARY for i in range(n)] for start, n in enumerate((50, 13, 33))]
POWERS = {"L1-sum": 1, "L1-avg": 1, "L2-sum": 2, "L2-avg": 2}


class Dense:
    """One request in a model that evicts nothing, but masks what ours should have evicted."""

    def __init__(self, model: Any, ids: list[int], prompt: int, aggregation: str, buffer: int, allocation: Any) -> None:
        self.model, self.ids, self.prompt, self.buffer, self.allocation = model, ids, prompt, buffer, allocation
        self.power, self.averages = POWERS[aggregation], aggregation.endswith("avg")
        config, n = model.config, len(ids)
        self.shape = (config.num_hidden_layers, config.num_key_value_heads)
        self.visible = torch.ones(n, n, dtype=torch.bool).tril().expand(*self.shape, n, n).clone()
        self.held = torch.ones(*self.shape, n, dtype=torch.bool)
        self.metric = torch.zeros(*self.shape, n, dtype=torch.float64)

    def attention(self, tokens: int) -> torch.Tensor:
        """[layers, kv_heads, group, queries, keys]"""
        visible[:], received[:] = [self.visible[..., :tokens, :tokens]], []
        with torch.inference_mode():
            self.model(torch.tensor([self.ids[:tokens]]))
        masses: torch.Tensor = torch.stack(received).unflatten(1, (self.shape[1], -1))
        return masses

    def counted(self, found: torch.Tensor, query: int) -> torch.Tensor:
        """Return what the keys receive from one query, [..., keys]."""
        far = torch.arange(found.shape[-1]) <= query - self.buffer
        return found[..., query, :] ** self.power * far

    def prefill(self) -> None:
        n = self.prompt
        found = self.attention(n)
        sums = sum(self.counted(found, query) for query in range(max(0, n - WINDOW), n))
        assert isinstance(sums, torch.Tensor)
        pooled = [sums[..., max(0, k - POOL // 2) : k + POOL // 2 + 1].amax(-1).sum(-1) for k in range(n)]
        self.metric[..., :n] = torch.stack(pooled, -1)

    def decode(self, position: int) -> None:
        """The step that computes the token at `position`."""
        self.visible[:, :, position] = False
        self.visible[:, :, position, : position + 1] = self.held[..., : position + 1]
        self.metric[..., : position + 1] += self.counted(self.attention(position + 1), position).sum(2)

    def evict(self, tokens: int, num_blocks: int) -> None:
        """Free pages while so many tokens are in the cache."""
        worth = self.metric.clone()
        if self.averages:
            queries = [*range(max(0, self.prompt - WINDOW), tokens)]
            worth /= torch.tensor([max(1, sum(q >= k + self.buffer for q in queries)) for k in range(len(self.ids))])
        lengths = self.held[..., :tokens].sum(-1)
        longest = int(lengths.max())
        positions = torch.zeros(*self.shape, longest, dtype=torch.int64)
        for layer in range(self.shape[0]):
            for head in range(self.shape[1]):
                at = self.held[layer, head, :tokens].nonzero().flatten()
                positions[layer, head, : len(at)] = at
        worth = worth.gather(-1, positions).float()
        limits = (num_blocks, SINKS, tokens - PROTECTED, BLOCK_SIZE, self.allocation)
        for (layer, head), gone in expected(World(worth, positions, lengths, *limits)).items():
            self.held[layer, head, positions[layer, head, gone]] = False

    def pages(self, tokens: int) -> int:
        return int((-(-self.held[..., :tokens].sum(-1) // BLOCK_SIZE)).sum())


@pytest.mark.parametrize(
    ("architecture", "aggregation", "buffer", "allocation"),
    [
        ("llama", "L2-sum", 0, "global"),
        ("qwen3", "L2-avg", 3, "global"),
        ("qwen2", "L1-sum", 2, "layer"),
        ("mistral", "L1-avg", 0, "head"),
    ],
)
def test_what_goes_is_what_a_dense_model_says(
    architecture: str, aggregation: str, buffer: int, allocation: str
) -> None:
    model = tiny_model(architecture)
    own = {"metric_aggregation": aggregation, "metric_collection_buffer_size": buffer, "kvc_allocation": allocation}
    with engine(model, **SETTINGS, **own) as llm:
        outputs, held = answers_of(llm, PROMPTS, greedy(24, ignore_eos=True))
    reference = masked_model(model)
    for output in outputs:
        ids, prompt = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]], len(output.prompt_token_ids)
        dense = Dense(reference, ids, prompt, aggregation, buffer, allocation)
        heads, kept = math.prod(dense.shape), -(-BUDGET // BLOCK_SIZE)
        dense.prefill()
        dense.evict(prompt, heads * max(0, -(-prompt // BLOCK_SIZE) - kept))
        compressed_at = prompt
        for tokens in range(prompt, len(ids)):  # in the cache
            excess = dense.pages(tokens) - heads * -(-min(BUDGET, tokens) // BLOCK_SIZE)
            if tokens - compressed_at >= INTERVAL and excess > 0:
                dense.evict(tokens, excess)
                compressed_at = tokens
            dense.decode(tokens)
            ours = held[output.request_id][tokens]
            assert torch.equal(ours, dense.held[..., : tokens + 1]), f"after {tokens + 1} tokens"
        assert not dense.held.all(), "something was evicted"
