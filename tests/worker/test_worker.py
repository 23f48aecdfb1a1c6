"""What the worker says about its memory."""

from __future__ import annotations

import logging

import pytest

from tests.distributed.ranks import rank_threads
from tests.engine.engines import tiny_model
from vllm_blend import LLM
from vllm_blend.worker import worker
from vllm_blend.worker.memory import GIB, Usage


def test_one_line_says_what_the_cache_holds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_blend.worker")
    llm = LLM(tiny_model("llama"), device="cpu", max_num_seqs=3, block_size=8)
    [line] = [record.message for record in caplog.records if record.name == "vllm_blend.worker.worker"]
    cache = llm.llm_engine.model_executor.driver_worker.model_runner.cache
    layers, _, _, kv_heads, head_dim = cache.key.shape
    assert cache.num_blocks == 3 * 12 + 1
    assert f"37 blocks, 288 tokens of {2 * layers * kv_heads * head_dim * 4} bytes" in line
    assert "3.0 requests of max_model_len=96 at once" in line


def test_each_rank_says_whose_cache_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_blend.worker")
    with rank_threads():
        LLM(tiny_model("llama"), device="cpu", tensor_parallel_size=2).shutdown()
    lines = sorted(record.message for record in caplog.records if record.name == "vllm_blend.worker.worker")
    assert [line[: line.index("KV cache")] for line in lines] == ["rank 0 of 2: ", "rank 1 of 2: "]


def test_an_override_is_taken_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm_blend.worker")
    LLM(tiny_model("llama"), device="cpu", block_size=8, num_gpu_blocks_override=26)
    assert "26 blocks, 200 tokens" in caplog.text


def test_memory_in_use_by_others_is_said(caplog: pytest.LogCaptureFixture) -> None:
    worker._warn_of_others(Usage(total=140 * GIB, used=GIB // 2, reserved=0, allocated=0), 0.9)
    assert caplog.records == []
    worker._warn_of_others(Usage(total=140 * GIB, used=50 * GIB, reserved=20 * GIB, allocated=20 * GIB), 0.9)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "50.00 of the GPU's 140.00 GiB are in use: 20.00 GiB by other tensors" in record.message
    assert "30.00 GiB by other processes" in record.message and "gpu_memory_utilization=0.9" in record.message
