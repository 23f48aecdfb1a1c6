"""Steps that are replayed from buffers give what steps that are launched anew do.

Nothing is captured on a CPU. What replays a step here runs it again, and sees the buffers alone: the numbers of rows
that it was made with are bounds, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.blend.prompts import plain
from tests.blend.test_serving import mixture
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, greedy, new_llm, pages_for, run, tiny_model, tokens_of
from vllm_blend import LLM
from vllm_blend.attention.metadata import LayerStep
from vllm_blend.attention.torch_native import TorchNativeBackend
from vllm_blend.worker.batch import Batch
from vllm_blend.worker.block_pass import BlockPass
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.step_graphs import StepGraphs

TINY = tiny_model("llama")
PARAMS = greedy(6, logprobs=2, ignore_eos=True)


class FollowsTheDevice(TorchNativeBackend):
    """Attends by what the tensors of a step say, whatever the host was told of its lengths."""

    capturable_prefill = True

    def attend(self, step: LayerStep) -> torch.Tensor:
        metadata = step.metadata
        assert metadata.device_query_start_loc is not None
        starts = metadata.device_query_start_loc.tolist()
        assert starts == sorted(starts) and starts[-1] == metadata.num_tokens
        positions = metadata.positions.tolist()
        lengths = [positions[stop - 1] + 1 if stop > start else 0 for start, stop in pairwise(starts)]
        own = metadata.narrow(torch.arange(metadata.num_tokens), starts)
        return super().attend(step._replace(metadata=_with_lengths(own, lengths)))


def _with_lengths(metadata: Any, lengths: list[int]) -> Any:
    object.__setattr__(metadata, "seq_lens", lengths)
    return metadata


def run_again(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stand in for a capture: a replay computes everything again, into the tensor that the first run filled."""
    result = work().clone()

    def replay() -> None:
        result.copy_(work())

    return replay, result


def block_pass_of(llm: LLM) -> BlockPass:
    block_pass: BlockPass = llm.llm_engine.model_executor.driver_worker.model_runner.block_pass
    return block_pass


@pytest.fixture(params=[1, 4])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    yield new_llm(TINY, enable_blending=True, max_num_seqs=request.param, attention_backend="torch_native")


def replaying(llm: LLM, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Have an engine replay its steps. Return a list that takes (rows, requests, whether it was replayed) of each that
    could be."""
    block_pass = block_pass_of(llm)
    cached = block_pass.parts
    parts = DeviceParts(cached.model, cached.cache, FollowsTheDevice(), cached.heads)
    with torch.inference_mode():
        engine = llm.llm_engine
        graphs = StepGraphs(parts, max_rows, engine.scheduler.max_num_seqs, engine.max_model_len, run_again)
    seen: list[tuple[int, int, bool]] = []
    replay = graphs.run

    def counting(batch: Batch) -> torch.Tensor | None:
        hidden = replay(batch)
        seen.append((batch.metadata.num_tokens, batch.metadata.num_requests, hidden is not None))
        return hidden

    monkeypatch.setattr(graphs, "run", counting)
    monkeypatch.setattr(block_pass, "step_graphs", graphs)
    return seen


@pytest.mark.parametrize("max_rows", [24, 40, 512])
def test_replayed_steps_give_the_same_answers(llm: LLM, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blends, prompts, follow-ups of them and decoding, alone and mixed; twice, so that buffers hold what was there."""
    follow_ups = [{"prompt_token_ids": [*range(3, 40)]}, {"prompt_token_ids": [*range(3, 48)]}]
    work = [*mixture(), *follow_ups]
    expected = [run(llm, work, PARAMS), run(llm, work[::-1], PARAMS)]
    llm.llm_engine.chunk_store.clear()
    llm.reset_prefix_cache()
    seen = replaying(llm, max_rows, monkeypatch)
    outputs = [run(llm, work, PARAMS), run(llm, work[::-1], PARAMS)]
    for ours, theirs in zip(outputs, expected, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_logprobs(one, other)
    replayed = [(rows, requests) for rows, requests, done in seen if done]
    assert all(done == (rows <= min(max_rows, 96)) for rows, _, done in seen)
    assert any(rows == requests for rows, requests in replayed)  # decoding alone
    if max_rows == 24:
        return  # one step with a prompt is small enough, or none
    assert any(rows > requests for rows, requests in replayed)
    if llm.llm_engine.scheduler.max_num_seqs > 1:
        assert any(1 < requests < rows for rows, requests in replayed)  # several requests, one of them with a prompt


def test_steps_that_a_hook_watches_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that looks at a layer narrows the step there, and an encoding keeps K and V of its rows."""
    llm = new_llm(TINY, enable_blending=True, attention_backend="torch_native")
    prompt = mixture()[0]
    assert prompt["blend_selector"] == "value_deviation"
    seen = replaying(llm, 512, monkeypatch)
    [output] = run(llm, prompt, PARAMS)
    assert output.blend is not None and output.blend.num_recomputed_tokens > 0
    assert all(rows == 1 for rows, _, _ in seen)  # only the decode steps came here
    run(llm, plain(prompt), PARAMS)
    assert seen[-6][0] > 1  # the prompt, before five steps of decoding


def test_preempted_requests_are_computed_again_by_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    room: dict[str, Any] = pages_for(6 * BLOCK_SIZE) | {"max_num_seqs": 3, "attention_backend": "torch_native"}
    llm = new_llm(TINY, enable_prefix_caching=False, max_model_len=6 * BLOCK_SIZE, **room)
    long = greedy(3 * BLOCK_SIZE, ignore_eos=True)
    work = [{"prompt_token_ids": [*range(5 + i, 5 + i + BLOCK_SIZE)]} for i in range(3)]
    expected = tokens_of(run(llm, work, long))
    before = llm.llm_engine.scheduler.num_preemptions
    seen = replaying(llm, 96, monkeypatch)
    assert tokens_of(run(llm, work, long)) == expected
    assert llm.llm_engine.scheduler.num_preemptions > before
    assert all(done for _, _, done in seen)


def test_a_backend_that_cannot_be_captured_is_refused() -> None:
    parts = block_pass_of(new_llm(TINY, attention_backend="torch_native")).parts
    with pytest.raises(ValueError, match=r"max_cudagraph_capture_size=64: .*'torch_native' cannot be captured"):
        StepGraphs(parts, 64, 4, 96, run_again)


def test_the_option_and_eager_steps_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="max_cudagraph_capture_size=64, but enforce_eager=True"):
        LLM(TINY, max_cudagraph_capture_size=64, enforce_eager=True)
    with pytest.raises(ValueError, match="max_cudagraph_capture_size"):
        LLM(TINY, max_cudagraph_capture_size=-1)


def test_an_engine_without_graphs_says_that_the_option_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    LLM(TINY, device="cpu", max_cudagraph_capture_size=64)
    assert "max_cudagraph_capture_size=64 does nothing: this engine runs without CUDA graphs" in caplog.text
