"""The KV cache fills its share of a GPU to the last block, the largest steps stay inside the share, and what does not
fit is named."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_blend import LLM, SamplingParams
from vllm_blend.worker.memory import GRANULARITY, OutOfDeviceMemory, Usage
from vllm_blend.worker.worker import Worker

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
TOKENIZER = "inputs/demo-model"
LENGTH = 8192
MIB = 2**20
SLACK = 8 * MIB  # for what CUDA and torch take in pieces of their own; measured on an H200: 1 to 3 MiB
SHAPE = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": LENGTH,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def build(folder: Path, shape: dict[str, Any] | None = None, **arguments: Any) -> LLM:
    (folder / "config.json").write_text(json.dumps(SHAPE | (shape or {})))
    defaults: dict[str, Any] = {"max_num_seqs": 64, "gpu_memory_utilization": 0.5, "blend_chunk_cache_gib": 1}
    return LLM(str(folder), tokenizer=TOKENIZER, load_format="dummy", device="cuda", **(defaults | arguments))


def worker_of(llm: LLM) -> Worker:
    return llm.llm_engine.model_executor.driver_worker


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def largest_prompts(blending: bool) -> list[Any]:
    """The longest prompt with the rest of the batch beside it; with blending, one computed whole up to its check
    layer, whose chunks are encoded first."""
    prompts: list[Any] = [{"prompt_token_ids": [7 + i] * 3} for i in range(63)]
    prompts.append({"prompt_token_ids": [5] * (LENGTH - 4)})
    if blending:
        chunks = [[10 + i] * 1000 for i in range(8)]
        own = {"blend_selector": "value_deviation", "blend_recompute_ratio": 0.1}
        prompts.append({"prefix": [3] * 100, "chunks": chunks, "suffix": [4] * 50} | own)
    return prompts


@pytest.mark.parametrize("blending", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cache_fills_the_share_and_no_step_leaves_it(tmp_path: Path, dtype: str, blending: bool) -> None:
    llm = build(tmp_path, dtype=dtype, enable_blending=blending)
    worker = worker_of(llm)
    share, pool = worker.memory, worker.pool
    assert share is not None and worker.model_runner.cache.num_blocks == pool.num_blocks
    assert share.activations > 0 and (share.graphs > 0) is (dtype == "bfloat16")
    assert 0 <= share.pool - pool.num_blocks * pool.block_bytes < pool.block_bytes + 2 * GRANULARITY

    now = Usage.settled(DEVICE)
    waiting = share.activations + share.chunk_store  # not in use yet
    assert abs(now.used + waiting - share.budget) < pool.block_bytes + 2 * GRANULARITY + SLACK

    torch.cuda.reset_peak_memory_stats(DEVICE)
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=5, max_tokens=3)
    for output in llm.generate(largest_prompts(blending), params, use_tqdm=False):
        assert output.error is None
    peak = Usage.now(DEVICE).other + torch.cuda.max_memory_reserved(DEVICE)
    assert peak <= share.budget + SLACK
    assert peak > share.budget - share.chunk_store - share.activations  # these were no small steps


def test_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    measured = build(tmp_path, seed=3, gpu_memory_utilization=0.2, enable_blending=True)
    worker = worker_of(measured)
    assert measured.llm_engine.blocks.num_free_blocks == measured.llm_engine.blocks.num_usable_blocks
    model = worker.model_runner.model
    before = Usage.settled(DEVICE)
    again = worker._share_out(model)
    after = Usage.settled(DEVICE)
    assert after.reserved == before.reserved and abs(after.allocated - before.allocated) < MIB
    assert worker.memory is not None and abs(again.activations - worker.memory.activations) <= 8 * MIB

    params = SamplingParams(temperature=1.0, max_tokens=8)  # drawn from the engine's own generator
    prompt: Any = {"prompt_token_ids": [5, 6, 7]}
    fixed = build(tmp_path, seed=3, num_gpu_blocks_override=1024)  # measures nothing
    texts = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for llm in (measured, fixed)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ({"num_hidden_layers": 3000}, {}, "the model's weights did not fit.*quantization='fp8'"),
        (
            {"num_hidden_layers": 2, "intermediate_size": 2**17},  # the last layer's MLP takes the wanted rows alone
            {"max_num_batched_tokens": 2**19, "max_num_seqs": 2048},
            "the activations of the largest step did not fit.*lower max_num_batched_tokens or max_num_seqs",
        ),
        ({}, {"num_gpu_blocks_override": 10**6}, "the KV cache did not fit.*num_gpu_blocks_override"),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, shape: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    before = Usage.settled(DEVICE)
    with pytest.raises(OutOfDeviceMemory, match=message) as caught:
        build(tmp_path, shape, **arguments)
    assert isinstance(caught.value.__cause__, RuntimeError) and "GiB" in str(caught.value)
    del caught
    after = Usage.settled(DEVICE)
    assert after.allocated - before.allocated < 16 * MIB  # libraries keep their workspaces


def test_a_share_that_is_too_small_says_where_it_went(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"room for \d+ tokens.*weights .*activations .*raise gpu_memory_utilization"):
        build(tmp_path, gpu_memory_utilization=0.01)
