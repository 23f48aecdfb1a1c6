"""Hundreds of steps of an engine with too few pages: requests come, go, are compressed and start again."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, feature, greedy, pages_for, tiny_model
from vllm_blend import LLM, SamplingParams
from vllm_blend.features.kv_compress.extension import KVCompression
from vllm_blend.features.kv_compress.state import COMPRESSION, in_head_pages

SETTINGS: dict[str, Any] = {
    "enable_kvc": True,
    "enable_blending": True,
    "protected_window_size": 6,
    "num_sinks": 1,
    "kvc_interval": 4,
    "prefill_metric_collection_window_size": 8,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
}


def params(rng: random.Random) -> SamplingParams:
    kept: dict[str, Any] = rng.choice(
        [{}, {"max_cache_tokens": 16}, {"max_cache_tokens": 30}, {"target_compression_rate": 0.4}]
    )
    own: dict[str, Any] = rng.choice([{}, {}, {"compress_once": True}])
    return greedy(rng.randrange(1, 26), ignore_eos=True, **kept, **own)


def prompt(rng: random.Random) -> Any:
    if rng.random() < 0.2:
        return tiny_prompt(blend_selector="question_attention", blend_recompute_ratio=0.3)
    return {"prompt_token_ids": [rng.randrange(TINY_VOCABULARY) for _ in range(rng.randrange(1, 60))]}


def assert_pages_have_one_owner(llm: LLM) -> None:
    inner = llm.llm_engine
    compression = feature(inner, KVCompression)
    tables, pool = compression.tables, compression.pool
    open_indices = [COMPRESSION.require(r).index for r in inner.scheduler.running if in_head_pages(r)]
    pages = np.concatenate([*(_pages(tables, index) for index in open_indices), np.empty(0, np.int64)])
    assert len(np.unique(pages)) == len(pages) == pool.num_used_pages
    layers, blocks, _, kv_heads, _ = inner.model_executor.driver_worker.model_runner.cache.key.shape
    cut = set((pages // kv_heads % blocks).tolist())
    assert not cut & {block for request in inner.scheduler.running for block in request.block_table}
    assert pool.num_cut_blocks == len(cut)
    assert layers * kv_heads == pool.pages_per_block


def _pages(tables: Any, index: int | None) -> np.ndarray:
    """Those of its KVs, and those taken ahead for its next token."""
    held: np.ndarray = tables.tables[index][tables.tables[index] > 0]
    assert len(held) >= (-(-tables.lengths[index] // BLOCK_SIZE)).sum()
    return held


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_every_page_comes_back(runs_ahead: bool) -> None:
    rng = random.Random(17)
    arguments = {**SETTINGS, **pages_for(20 * BLOCK_SIZE), "async_scheduling": runs_ahead}
    with engine(tiny_model("llama"), **arguments) as llm:
        inner = llm.llm_engine
        live: set[str] = set()
        seen: Counter[str] = Counter()
        for step in range(700):
            while len(live) < 10 and rng.random() < 0.3:
                name = str(seen["arrived"])
                inner.add_request(name, prompt(rng), params(rng))
                live.add(name)
                seen["arrived"] += 1
            if live and rng.random() < 0.04:
                name = rng.choice(sorted(live))
                inner.abort_request(name)
                live.discard(name)
                seen["aborted"] += 1
            for output in inner.step():
                assert output.error is None
                if output.finished:
                    live.discard(output.request_id)
                    seen["finished"] += 1
            if step % 50 == 0:
                assert_pages_have_one_owner(llm)
        inner.abort_request(sorted(live))
        while inner.has_unfinished_requests():
            inner.step()
        gauges = {metric.name: metric.value for metric in llm.get_metrics()}
        assert gauges["vllm_blend:head_pages_used"] == 0
        assert gauges["vllm_blend:kv_compressions"] > 140
        assert inner.scheduler.num_preemptions > 5
        assert seen["finished"] > 140
        assert seen["aborted"] > 14
        assert feature(inner, KVCompression).pool.num_cut_blocks == 0
