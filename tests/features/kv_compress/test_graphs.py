"""Steps in head pages as graphs replay them, tried without a GPU: buffers are filled, and the step is run on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import TINY_VOCABULARY, engine, feature, greedy, run, tiny_model
from tests.features.kv_compress.test_together import SETTINGS as TOGETHER
from vllm_blend import LLM
from vllm_blend.features.kv_compress.extension import KVCompression
from vllm_blend.features.kv_compress.graphs import CompressedGraphs
from vllm_blend.features.kv_compress.passes import CompressionPasses

TINY = tiny_model("llama")
SETTINGS: dict[str, Any] = TOGETHER | {"max_num_seqs": 8}
PARAMS = greedy(20, logprobs=2, ignore_eos=True)


def prompt(length: int, start: int = 0) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(7 * i * i + 3 * i + start) % TINY_VOCABULARY for i in range(length)]}


class Recorder:
    """Stands in for CUDA: a replay does the step again, into the same tensor."""

    def __init__(self) -> None:
        self.replays: list[int] = []  # batch sizes

    def __call__(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = work().clone()

        def replay() -> None:
            result.copy_(work())
            self.replays.append(len(result))

        return replay, result


@contextmanager
def graphs(llm: LLM, max_num_seqs: int) -> Iterator[tuple[CompressedGraphs, Recorder]]:
    decode = llm.llm_engine.model_executor.driver_worker.extension(CompressionPasses).decode
    recorder = Recorder()
    with torch.inference_mode():
        decode.graphs = CompressedGraphs(decode.step, max_num_seqs, 96, capture=recorder)
    try:
        yield decode.graphs, recorder
    finally:
        decode.graphs = None


@pytest.mark.parametrize("metric", ["kv_compress", "keydiff"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_replays_answer_as_steps_do(metric: str, runs_ahead: bool) -> None:
    prompts = [prompt(length, start) for length, start in ((60, 0), (33, 5), (9, 2), (50, 8), (70, 1))]
    params = [greedy(n, logprobs=2, ignore_eos=True) for n in (22, 7, 12, 20, 17)]
    arguments = {**SETTINGS, "kvc_metric": metric, "async_scheduling": runs_ahead}
    with engine(TINY, **arguments) as llm:
        before = feature(llm.llm_engine, KVCompression).engine.num_evicted
        expected = run(llm, prompts, params)
        evicted = feature(llm.llm_engine, KVCompression).engine.num_evicted
        llm.reset_prefix_cache()
        with graphs(llm, 8) as (_, recorder):
            for ours, theirs in zip(run(llm, prompts, params), expected, strict=True):
                assert_same_logprobs(ours, theirs)
        assert set(recorder.replays) >= {1, 4, 8}  # up to five requests in a batch
        after = feature(llm.llm_engine, KVCompression).engine.num_evicted
        assert after - evicted == evicted - before > 0


def test_nothing_that_a_graph_reads_is_replaced() -> None:
    with engine(TINY, **SETTINGS, kvc_metric="random") as llm, graphs(llm, 4) as (made, recorder):
        tables = feature(llm.llm_engine, KVCompression).tables
        cache = feature(llm.llm_engine, KVCompression).cache_engine

        def addresses() -> list[int]:
            read = (*vars(made.tables).values(), cache.metric, cache.position, cache.head_keys, cache.head_values)
            return [tensor.data_ptr() for tensor in read]

        before, had = addresses(), tables.lengths.shape[0]
        width = tables.tables.shape[3]
        longest = prompt(70)
        run(llm, [longest | {}, prompt(20, 3)], greedy(20, ignore_eos=True, max_cache_tokens=69))
        assert tables.tables.shape[3] > width  # the engine's own tables have grown meanwhile
        assert tables.lengths.shape[0] == had  # there is room for as many requests as run
        assert recorder.replays
        assert addresses() == before
        assert made.nbytes == sum(tensor.nbytes for tensor in vars(made.tables).values())


def test_a_batch_beyond_the_largest_graph_runs_without() -> None:
    prompts = [prompt(40, start) for start in range(3)]
    with engine(TINY, **SETTINGS) as llm:
        expected = run(llm, prompts, PARAMS)
        llm.reset_prefix_cache()
        with graphs(llm, 2) as (_, recorder):
            for ours, theirs in zip(run(llm, prompts, PARAMS), expected, strict=True):
                assert_same_logprobs(ours, theirs)
        assert not recorder.replays
