from __future__ import annotations

import dataclasses

import pytest

from vllm_blend.outputs import BlendStats, CompletionOutput, FlatLogprobs, Logprob, RequestMetrics, RequestOutput


def test_time_in_queue_is_from_arrival_to_first_step() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.time_in_queue is None
    metrics.first_scheduled_time, metrics.first_token_time = 12.5, 13.0
    assert metrics.time_in_queue == 2.5
    assert metrics.first_token_time - metrics.first_scheduled_time == 0.5


def test_completion_is_finished_with_a_reason() -> None:
    completion = CompletionOutput(index=0, text="", token_ids=[])
    assert not completion.finished()
    completion.finish_reason = "length"
    assert completion.finished()


def test_request_output_reads_as_vllms() -> None:
    output = RequestOutput("7", "a b", [1, 2], None, [CompletionOutput(0, " c", [3])], finished=False)
    assert (output.request_id, output.prompt, output.outputs[0].text, output.outputs[0].token_ids) == (
        "7",
        "a b",
        " c",
        [3],
    )
    assert output.blend is None and output.error is None and output.metrics is None and output.num_cached_tokens is None


def test_blend_stats_cannot_be_changed() -> None:
    stats = BlendStats("none", 5, 3, 2, num_chunks=1, recompute_ratio=0.15)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.num_reused_tokens = 0  # type: ignore[misc]


def test_flat_logprobs_read_like_a_list_of_dicts() -> None:
    entries = [None, {7: Logprob(-0.5, 1, "a"), 9: Logprob(-1.5, 2, "b")}, {}, {3: Logprob(-2.0)}]
    flat, listed = FlatLogprobs.from_positions(entries), [entry or {} for entry in entries]
    assert list(flat) == listed and len(flat) == 4 and flat[-1] == listed[-1] and flat != FlatLogprobs()
    assert flat.start_indices == [0, 0, 2, 2] and flat.end_indices == [0, 2, 2, 3]
    assert (flat.token_ids, flat.ranks) == ([7, 9, 3], [1, 2, None])
    assert (flat.logprobs, flat.decoded_tokens) == ([-0.5, -1.5, -2.0], ["a", "b", None])
    for part in (slice(1, None), slice(None, None, -1), slice(-2, None), slice(3, 1), slice(0, 9, 2)):
        assert isinstance(flat[part], FlatLogprobs) and list(flat[part]) == listed[part]
    with pytest.raises(IndexError):
        flat[4]
