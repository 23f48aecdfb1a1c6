"""Random traffic through engines whose model is shared by ranks: the answers of one process."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.ranks import threaded_llm
from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import BLOCK_SIZE, assert_empty, engine, pages_for, threads, tiny_model
from tests.engine.test_draws_ahead import ARRIVALS, TINY, Arrival, Service
from tests.engine.test_traffic import ARRIVAL, SIZE, alone, serve
from vllm_blend.executor.multiproc import MultiProcExecutor

pytestmark = pytest.mark.cpu_only
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3}
TIGHT = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **pages_for(104)}  # prompts in pieces, and preempted ones


@pytest.mark.parametrize(
    ("architecture", "overrides", "size", "arguments"),
    [
        ("llama", {}, 2, {"async_scheduling": True, **TIGHT}),
        ("mistral", {"sliding_window": 20}, 2, {"max_num_seqs": 8, "blend_chunk_cache_gib": 6 * SIZE / 2**20}),
        ("qwen3_moe", {}, 4, {"speculative_config": DRAFTS}),
    ],
)
@settings(max_examples=6, deadline=None, derandomize=True)  # always the same: a token on the edge of rounding is luck
@given(data=st.data())
def test_answers_are_those_of_one_process(
    architecture: str, overrides: dict[str, Any], size: int, arguments: dict[str, Any], data: st.DataObject
) -> None:
    """Whatever arrives when, in however little room: blends by every rule, prefixes, aborted and preempted requests."""
    model = tiny_model(architecture, **overrides)
    arrivals = data.draw(st.lists(ARRIVAL, min_size=1, max_size=10))
    options: dict[str, Any] = {"enable_blending": True, "block_size": BLOCK_SIZE, **arguments}
    with threads(1), threaded_llm(model, size, **options) as llm:
        done = serve(llm, arrivals)
        assert_empty(llm)
        executor = llm.llm_engine.model_executor
        assert isinstance(executor, MultiProcExecutor) and len(executor.pids) == size - 1
    for index, (_, rule, prefix, chunks, suffix, max_tokens, seed, abort) in enumerate(arrivals):
        assert str(index) in done or abort is not None
        if str(index) in done:
            expected = alone(model, rule, prefix, tuple(chunks), suffix, max_tokens, seed)
            assert_same_logprobs(done[str(index)], expected)
            assert blend_of(done[str(index)]) == blend_of(expected)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(arrivals=ARRIVALS)
def test_draws_follow_tokens_while_the_model_runs_ahead(arrivals: list[Arrival]) -> None:
    """Rank 0 draws for all, and the other ranks get a token only when they go on from it."""
    options: dict[str, Any] = {"enable_blending": True, "block_size": BLOCK_SIZE, **TIGHT}
    monkeypatch = pytest.MonkeyPatch()
    with threads(1), threaded_llm(TINY, 2, async_scheduling=True, **options) as llm:
        found = Service(llm, arrivals).run(monkeypatch)
        assert_empty(llm)
    with engine(TINY, async_scheduling=False, **options) as one:
        expected = Service(one, arrivals).run(monkeypatch)
    for index, arrival in enumerate(arrivals):
        if arrival.abort is None or (str(index) in found and str(index) in expected):
            assert found[str(index)] == expected[str(index)]
