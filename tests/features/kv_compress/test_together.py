"""Requests that are due at a time are worked out together, with one wait for all: to the same end as one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, run, tiny_model
from vllm_blend import LLM, RequestOutput
from vllm_blend.features.kv_compress import engine as engine_module
from vllm_blend.features.kv_compress.engine import KVCompressEngine
from vllm_blend.features.kv_compress.scheduler import Eviction
from vllm_blend.ops.host_copy import HostCopy

SETTINGS: dict[str, Any] = {
    "enable_kvc": True,
    "protected_window_size": 6,
    "num_sinks": 1,
    "kvc_interval": 4,
    "prefill_metric_collection_window_size": 8,
    "max_cache_tokens": 16,
    "block_size": BLOCK_SIZE,
}
PROMPTS = [
    {"prompt_token_ids": [(7 * i * i + 3 * i + start) % TINY_VOCABULARY for i in range(length)]}
    for length, start in ((60, 0), (33, 5), (50, 8), (41, 1))
]


class Watch:
    """Counts requests by batch, and waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self.waits = self.choices = 0
        evict, choose = KVCompressEngine._evict, KVCompressEngine.choose

        def evicting(own: KVCompressEngine, batch: Sequence[Eviction]) -> Any:
            self.batches.append(len(batch))
            return evict(own, batch)

        def choosing(own: KVCompressEngine, prompts: Sequence[Eviction]) -> Any:
            self.choices += 1
            return choose(own, prompts)

        def copying(tensor: torch.Tensor) -> HostCopy:
            self.waits += 1
            return HostCopy(tensor)

        patch.setattr(KVCompressEngine, "_evict", evicting)
        patch.setattr(KVCompressEngine, "choose", choosing)
        patch.setattr(engine_module, "HostCopy", copying)


def answers(llm: LLM) -> list[RequestOutput]:
    llm.reset_prefix_cache()
    return run(llm, PROMPTS, greedy(20, logprobs=2, ignore_eos=True))


@pytest.mark.parametrize("metric", ["kv_compress", "keydiff"])
def test_together_is_one_by_one(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tiny_model("llama"), **SETTINGS, kvc_metric=metric) as llm:
        together = Watch(monkeypatch)
        expected = answers(llm)
        assert max(together.batches) == len(PROMPTS)
        assert together.waits == len(together.batches) + together.choices
        monkeypatch.undo()
        monkeypatch.setattr(engine_module, "SORTED_TOGETHER", 1)
        alone = Watch(monkeypatch)
        for ours, theirs in zip(answers(llm), expected, strict=True):
            assert_same_logprobs(ours, theirs)
        assert set(alone.batches) == {1}
        assert sum(alone.batches) == sum(together.batches)
