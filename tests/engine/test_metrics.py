"""Counters of an engine and the line it logs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.blend.prompts import plain, tiny_prompt
from tests.engine.engines import new_llm, tiny_model
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
    if llm.llm_engine.loop.stat_logger is not None:
        llm.llm_engine.loop.stat_logger.interval = 0.0
    with caplog.at_level(logging.INFO):
        llm.generate("Question:", SamplingParams(max_tokens=3), use_tqdm=False)
    assert any("generation throughput" in record.getMessage() for record in caplog.records) is not disabled


def test_counters_follow_the_work() -> None:
    llm = new_llm(max_num_seqs=2)
    prompt: Any = {"prompt_token_ids": list(range(10, 60))}
    for n, found in ((1, {}), (1, {"prefix_cache": 48}), (2, {"prefix_cache": 48})):  # each completion counts
        [output] = llm.generate([prompt], SamplingParams(n=n, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert output.num_found_tokens == found
    values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert values["vllm:prompt_tokens"] == values["vllm:prefix_cache_queries"] == 4 * 50
    assert values["vllm:generation_tokens"] == 4 * 4
    assert values["vllm:prefix_cache_hits"] == values["vllm_blend:found_tokens_prefix_cache"] == 3 * 48
    assert values["vllm:request_success_length"] == 4
    assert values["vllm:kv_cache_usage_perc"] == 0


def test_counters_tell_what_was_found_from_what_was_encoded() -> None:
    llm = new_llm(tiny_model("llama"), enable_blending=True, blend_selector="first_tokens", blend_recompute_ratio=0.3)
    prompt = tiny_prompt()
    context, total = sum(map(len, prompt["chunks"])) + 5, len(plain(prompt)["prompt_token_ids"])
    chosen = int(0.3 * context)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))  # type: ignore[arg-type]
    assert first.blend is not None and second.blend is not None
    assert (first.num_cached_tokens, first.num_found_tokens, first.blend.num_reused_tokens) == (0, {}, 0)
    assert first.blend.num_encoded_tokens == second.num_cached_tokens == context - chosen
    assert second.blend.num_encoded_tokens == 0
    assert set(second.num_found_tokens) <= {"host", "device"}
    values = {metric.name.removeprefix("vllm_blend:"): metric.value for metric in llm.get_metrics()}
    assert values["blended_prompts"] == 2
    assert values["blend_encoded_tokens"] == values["blend_reused_tokens"] == context - chosen
    assert values["blend_recomputed_tokens"] == 2 * (total - context + chosen)
    assert values["found_tokens_host"] + values["found_tokens_device"] == context - chosen
    assert values["found_tokens_prefix_cache"] == values["found_tokens_joined"] == 0


def test_chunks_without_blending_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = new_llm(tiny_model("llama"))
    for _ in range(2):
        [output] = llm.generate(tiny_prompt(), SamplingParams(max_tokens=2), use_tqdm=False)  # type: ignore[arg-type]
    assert caplog.text.count("a prompt has chunks, but the engine does not blend") == 1
    assert output.blend is None and output.num_found_tokens == {"prefix_cache": output.num_cached_tokens}


@pytest.mark.parametrize(
    "pieces", [["Read this. ", "One. ", "Two.\n", "Which?"], ["Read ", [40, 41], "Two.", "Which?"]]
)
def test_an_output_shows_the_whole_text_of_a_prompt_in_pieces(pieces: list[Any]) -> None:
    llm = new_llm(tiny_model("llama"), enable_blending=True)
    prompt: Any = {"prefix": pieces[0], "chunks": pieces[1:3], "suffix": pieces[3]}
    [output] = llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    is_text = all(isinstance(piece, str) for piece in pieces)
    assert output.prompt == ("".join(pieces) if is_text else llm.get_tokenizer().decode(output.prompt_token_ids))
    [silent] = llm.generate(prompt, SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
    assert (silent.prompt is None) is not is_text
