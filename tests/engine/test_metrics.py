"""Counters of an engine and the line it logs."""

from __future__ import annotations

import logging

import pytest

from tests.engine.engines import new_llm
from vllm_blend import SamplingParams
from vllm_blend.engine.metrics import EngineMetrics, StatLogger


def test_stats_are_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    metrics = EngineMetrics(prompt_tokens=5)
    with caplog.at_level(logging.INFO):
        eager = StatLogger(metrics, interval=0.0)
        metrics.generation_tokens += 7
        eager.step(num_running=2, num_waiting=1, cache_usage=0.25)
        StatLogger(metrics, interval=3600.0).step(num_running=9, num_waiting=9, cache_usage=1.0)
    [line] = [record.getMessage() for record in caplog.records]
    assert "running 2, waiting 1, KV cache usage 25.0%" in line
    assert "prompt throughput 0.0" in line, "only what came since the logger was made counts"


@pytest.mark.parametrize("disabled", [True, False])
def test_disable_log_stats_decides_whether_lines_are_written(disabled: bool, caplog: pytest.LogCaptureFixture) -> None:
    llm = new_llm(disable_log_stats=disabled, max_num_seqs=2)
    if llm.llm_engine._stat_logger is not None:
        llm.llm_engine._stat_logger.interval = 0.0
    with caplog.at_level(logging.INFO):
        llm.generate("Question:", SamplingParams(max_tokens=3), use_tqdm=False)
    assert any("generation throughput" in record.getMessage() for record in caplog.records) is not disabled


def test_counters_follow_the_work() -> None:
    llm = new_llm(max_num_seqs=2)
    prompt = {"prompt_token_ids": list(range(10, 60))}
    for _ in range(2):
        llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert values["vllm:prompt_tokens"] == 100
    assert values["vllm:generation_tokens"] == 8
    assert values["vllm:prefix_cache_hits"] == 48
    assert values["vllm:request_success_length"] == 2
    assert values["vllm:kv_cache_usage_perc"] == 0
