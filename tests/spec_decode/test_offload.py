"""Chunks that move while drafts are verified."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, run
from tests.offload.placements import move_at_once
from tests.spec_decode.engines import counts, real_drafters, speculating


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


@pytest.mark.parametrize("method", real_drafters())
def test_the_predictor_sees_where_the_drafts_come_from(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that copies from a chunk brings that chunk to the device, whatever its rank said. The answer is short,
    so the chunk does not come in time where copies and scores do not."""
    prompt = demo_prompt(0, 6)
    prompt["chunk_ranking"] = [5, 4, 3, 2, 1, 0]
    arguments = {"enable_blending": True, "block_size": 16, "offload_mode": "exact", "offload_predictor": "draft_union"}
    with speculating(DEMO, method, **arguments, async_scheduling=False) as llm:
        move_at_once(llm, monkeypatch)
        inner, seen = llm.llm_engine, []
        offload = inner.offload
        assert offload is not None
        score = type(offload.scorer.predictor).score

        def watching(predictor: object, evidence: Any) -> Any:
            scores = score(predictor, evidence)
            seen.append((evidence.draft_source, scores.argmax().item()))
            return scores

        monkeypatch.setattr(type(offload.scorer.predictor), "score", watching)
        inner.add_request("a", prompt, greedy(24, ignore_eos=True))
        promoted = set()
        while inner.has_unfinished_requests():
            inner.step()
            promoted |= set(offload.reports["a"].promotions) if "a" in offload.reports else set()
    sources = {source for source, _ in seen if source is not None}
    assert sources, "no draft came from a chunk"
    assert all(best == source for source, best in seen if source is not None)
    assert promoted & sources
