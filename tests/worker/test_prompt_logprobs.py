"""The log-probabilities of a long prompt are computed a few rows at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.engines import tiny_model
from vllm_blend import LLM, SamplingParams
from vllm_blend.worker import block_pass


def test_pieces_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_model("llama"), device="cpu", enable_prefix_caching=False)
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
    prompt: Any = {"prompt_token_ids": list(range(3, 40))}
    [whole] = llm.generate([prompt], params, use_tqdm=False)
    rows: list[int] = []
    compute = runner.model.compute_logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(runner.model, "compute_logits", watched)
    monkeypatch.setattr(block_pass, "MAX_ELEMENTS_AT_ONCE", 8 * runner.model.config.vocab_size)
    [pieces] = llm.generate([prompt], params, use_tqdm=False)
    assert rows == [8, 8, 8, 8, 4, 1, 1]  # 36 prompt tokens have a predecessor; then two answers
    assert whole.prompt_logprobs is not None and pieces.prompt_logprobs is not None
    assert len(pieces.prompt_logprobs) == 37 and pieces.prompt_logprobs[0] is None
    for ours, expected in zip(pieces.prompt_logprobs[1:], whole.prompt_logprobs[1:], strict=True):
        assert ours is not None and expected is not None
        assert ours.keys() == expected.keys()
        for token, entry in ours.items():
            assert entry.rank == expected[token].rank
            assert entry.logprob == pytest.approx(expected[token].logprob, abs=1e-5)
