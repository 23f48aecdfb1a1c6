"""Engines with any settings that go together, and requests with any of their own: what holds for all of them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import (
    BLOCK_SIZE,
    TINY_VOCABULARY,
    assert_empty,
    engine,
    feature,
    new_llm,
    pages_for,
    run,
    tiny_model,
)
from tests.features.kv_compress.test_soak import assert_pages_have_one_owner
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.features.kv_compress.extension import KVCompression
from vllm_blend.features.kv_compress.metrics import METRICS, setting_names

KEPT: list[dict[str, Any]] = [
    {},
    {"target_compression_rate": 1.0},
    {"max_cache_tokens": 96},  # as many as a request may have
    {"max_cache_tokens": 16},
    {"max_cache_tokens": 30, "compress_once": True},
    {"target_compression_rate": 0.05},
    {"target_compression_rate": 0.5, "num_sinks": 0, "protected_window_size": 5},
]
PLAIN = KEPT[:3]


@st.composite
def engine_settings(draw: st.DrawFn) -> dict[str, Any]:
    metric = draw(st.sampled_from(sorted(METRICS)))
    known = setting_names(metric)
    sequences = draw(st.sampled_from([1, 3, 6]))
    chosen: dict[str, Any] = {
        "enable_kvc": True,
        "enable_blending": True,
        "enable_prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "attention_backend": draw(st.sampled_from(["auto", "torch_native"])),
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(sequences, draw(st.sampled_from([7, 16, 64]))),
        "protected_window_size": draw(st.sampled_from([4, 6, 8])),
        "num_sinks": draw(st.sampled_from([0, 1, 4])),
        "kvc_interval": draw(st.sampled_from([1, 4, 9, 100])),
        "prefill_metric_collection_window_size": draw(st.sampled_from([1, 8, 32])),
        "kvc_metric": metric,
        "kvc_allocation": draw(st.sampled_from(["auto", "global", "layer", "head"])),
        "block_size": BLOCK_SIZE,
    }
    if "buffer" in known:
        chosen["metric_collection_buffer_size"] = draw(st.sampled_from([0, 3]))
    if "aggregation" in known:
        chosen["metric_aggregation"] = draw(st.sampled_from(["L1-sum", "L1-avg", "L2-sum", "L2-avg"]))
    crowded = draw(st.booleans())
    if crowded:  # what a request answers may depend on when others need pages, and on whose turn it is
        chosen |= pages_for(draw(st.sampled_from([104, 160])))
        chosen |= draw(st.sampled_from([{}, {"new_token_limit": 20}, {"max_kv_per_compression": 200}]))
    return chosen


@st.composite
def requests(draw: st.DrawFn) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A prompt, how it is sampled, and what it keeps."""
    length, start = draw(st.sampled_from([1, 2, 9, 24, 33, 50, 59])), draw(st.integers(0, 2))
    prompt: Any = {"prompt_token_ids": [(7 * i * i + 3 * i + start) % TINY_VOCABULARY for i in range(length)]}
    if draw(st.sampled_from([False, False, True])):
        prompt = tiny_prompt(blend_selector="random", blend_recompute_ratio=0.3)
    how = draw(st.sampled_from([{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]))
    how = how | {"max_tokens": draw(st.sampled_from([1, 2, 12, 30])), "ignore_eos": draw(st.booleans())}
    return prompt, how | draw(st.sampled_from([{}, {}, {"stop": ["e"]}])), draw(st.sampled_from(KEPT))


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def serve(llm: LLM, drawn: list[Any], aborted: int) -> dict[str, RequestOutput]:
    """All of them at once, but for one that is given up after some steps."""
    inner, done, steps = llm.llm_engine, dict[str, RequestOutput](), 0
    for index, (prompt, how, kept) in enumerate(drawn):
        inner.add_request(str(index), prompt, SamplingParams(**how, **kept))
    while inner.has_unfinished_requests():
        for output in inner.step():
            assert output.error is None
            if output.finished:
                done[output.request_id] = output
        steps += 1
        if steps == 5:
            inner.abort_request(str(aborted))
            done.pop(str(aborted), None)
        if steps % 5 == 0:
            assert_pages_have_one_owner(llm)
    return done


@settings(max_examples=25, deadline=None, derandomize=True)
@given(engine_settings(), st.lists(requests(), min_size=2, max_size=7), st.integers(0, 6))
def test_whatever_is_asked_for(options: dict[str, Any], drawn: list[Any], aborted: int) -> None:
    llm, threads = new_llm(tiny_model("llama"), **options), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done = serve(llm, drawn, aborted)
        assert_empty(llm)
        assert feature(llm.llm_engine, KVCompression).pool.num_cut_blocks == 0
        for name, output in done.items():
            prompt, how, kept = drawn[int(name)]
            if kept in PLAIN:
                with engine(tiny_model("llama"), enable_blending=True, block_size=BLOCK_SIZE) as plain:
                    assert tokens(run(plain, prompt, SamplingParams(**how))[0]) == tokens(output)
            elif "num_gpu_blocks_override" not in options:
                llm.reset_prefix_cache()
                assert tokens(run(llm, prompt, SamplingParams(**how, **kept))[0]) == tokens(output)
    finally:
        torch.set_num_threads(threads)
