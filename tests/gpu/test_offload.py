"""Chunks that move between a GPU and pinned memory while decoding: copies on a stream of their own, and graphs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import demo_prompt, engine, greedy, run
from vllm_blend.offload.block_pool import HostBlockPool
from vllm_blend.offload.copies import StreamCopies

pytestmark = pytest.mark.gpu

PARAMS = greedy(12, logprobs=5, ignore_eos=True)


def test_blocks_cross_the_link_and_come_back():
    key, value = (torch.randn(3, 9, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = key.clone(), value.clone()
    host = HostBlockPool(64 << 20, 3, 16, 2, 64, torch.bfloat16, pinned=True)
    copies = StreamCopies(key, value, host)
    taken = host.allocate(3)
    assert taken is not None
    _wait(copies.submit([7, 2, 5], taken, True))
    _wait(copies.submit([1, 8, 3], taken, False))
    for tensor, old in zip((key, value), before, strict=True):
        assert torch.equal(tensor[:, [1, 8, 3]], old[:, [7, 2, 5]])
        assert torch.equal(tensor[:, [0, 2, 4, 5, 6, 7]], old[:, [0, 2, 4, 5, 6, 7]])


def _wait(ticket: Any) -> None:
    deadline = time.monotonic() + 10
    while not ticket.done() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert ticket.done()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_exact_mode_gives_the_answers_of_all_on_the_gpu(share):
    prompts = [demo_prompt(index, 6) for index in range(3)]
    with engine(enable_blending=True) as llm:
        expected = run(llm, prompts, PARAMS)
    with engine(enable_blending=True, offload_mode="exact", offload_device_fraction=share) as llm:
        for left, right in zip(run(llm, prompts, PARAMS), expected, strict=True):
            assert_same_logprobs(left, right)


def test_resident_mode_is_the_same_with_and_without_graphs():
    prompts = [demo_prompt(index, 6) for index in range(3)]
    settings: dict[str, Any] = {"enable_blending": True, "offload_mode": "resident"}
    settings |= {"offload_predictor": "retrieval_rank", "async_scheduling": False}
    outputs = []
    for eager in (False, True):
        with engine(**settings, enforce_eager=eager) as llm:
            outputs.append(run(llm, prompts, PARAMS))
            offload = llm.llm_engine.offload
            assert offload is not None and offload.scheduler.num_evictions > 0
    for left, right in zip(*outputs, strict=True):
        assert_same_logprobs(left, right)
