"""Engines on two GPUs of one process, neither of which need be the current one."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.gpu.test_engine import MODEL, prompts
from vllm_blend import LLM, SamplingParams, ops

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

GREEDY = SamplingParams(temperature=0, max_tokens=16)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 4096, "max_num_seqs": 16, "dtype": "bfloat16"}
BLENDING: dict[str, Any] = {"enable_blending": True, "blend_chunk_cache_gib": 0.25}
KINDS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "blending": BLENDING,
    "pinned": BLENDING | {"blend_chunk_device": "cpu"},
    "offload": BLENDING | {"offload_mode": "exact", "offload_host_gib": 0.25},
    "cascade": {"cascade_attention": True},
    "kv_compress": {"enable_kvc": True, "target_compression_rate": 0.5, "kvc_interval": 8},
}


def answers(llm: LLM) -> list[list[int]]:
    twice = [llm.generate(prompts(4), GREEDY, use_tqdm=False) for _ in range(2)]  # the second time from what is stored
    assert [output.error for outputs in twice for output in outputs] == [None] * 8
    return [list(output.outputs[0].token_ids) for outputs in twice for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_device_answers_as_the_first(kind: str) -> None:
    """Both engines live at once, take turns, and leave the caller's current device as it is."""
    engines = [LLM(MODEL, device=f"cuda:{index}", **SMALL, **KINDS[kind]) for index in (0, 1)]
    expected, second = [answers(llm) for llm in engines]
    assert second == expected
    assert torch.cuda.current_device() == 0
    for index, llm in enumerate(engines):
        tensors = [*llm.apply_model(lambda model: list(model.parameters()))[0]]
        assert {tensor.device.index for tensor in tensors} == {index}
    assert answers(engines[1]) == answers(engines[0])
    with ThreadPoolExecutor(1) as other_thread:  # whose current device is 0
        assert other_thread.submit(answers, engines[1]).result() == answers(engines[1])


def test_nothing_is_left_on_the_first_device() -> None:
    gc.collect()  # engines of other tests
    before = torch.cuda.memory_allocated(0)
    llm = LLM(MODEL, device="cuda:1", **SMALL, **BLENDING)
    answers(llm)
    assert torch.cuda.memory_allocated(0) == before


def test_the_current_device_is_what_cuda_means() -> None:
    with torch.cuda.device(1):
        llm = LLM(MODEL, device="cuda", **SMALL)
    assert llm.llm_engine.device == torch.device("cuda", 1)
    answers(llm)


def test_a_kernel_refuses_tensors_of_another_device() -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16, device="cuda:1")
    with pytest.raises(RuntimeError, match="current device of this thread is cuda:0"):
        ops.rms_norm(x, x[0].contiguous(), 1e-5)
