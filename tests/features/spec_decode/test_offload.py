"""Chunks that move while drafts are verified."""

from __future__ import annotations

import pytest

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, run
from tests.features.spec_decode.engines import counts, real_drafters, speculating


@pytest.mark.parametrize("method", real_drafters())
def test_answers_are_the_same_wherever_chunks_are(method: str) -> None:
    prompts = [demo_prompt(i, 6) for i in range(3)]
    asked = greedy(16, logprobs=1)
    with engine(DEMO, enable_blending=True) as llm:
        plain = run(llm, prompts, asked)
    with speculating(DEMO, method, enable_blending=True, block_size=16, offload_mode="exact") as llm:
        before = counts(llm)
        outputs = run(llm, prompts, asked)
        assert counts(llm)[2] > before[2]
        moved = {metric.name: metric.value for metric in llm.llm_engine.get_metrics()}
        assert moved["vllm_blend:offload_bytes_moved"] > 0
    for ours, expected in zip(outputs, plain, strict=True):
        assert_same_logprobs(ours, expected)
