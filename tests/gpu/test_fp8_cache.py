"""An engine with an FP8 KV cache on a GPU answers as on a CPU, with plain torch, without graphs, with every feature."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.test_engine import GREEDY, MODEL, SMALL, first_difference, prompts
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.ops.e4m3 import E4M3

pytestmark = pytest.mark.gpu

# Of the first token's log-probabilities. Where other shapes of products change the last bit of bfloat16, what it is
# rounded to in e4m3 changes by up to 1/8 of it.
TOLERANCE = 1.0
FP8: dict[str, Any] = {"device": "cuda", "kv_cache_dtype": "fp8", **SMALL}


@pytest.fixture(scope="module", autouse=True)
def freed() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def full() -> list[RequestOutput]:
    llm = LLM(MODEL, dtype="bfloat16", enable_prefix_caching=False, **FP8)
    worker = llm.llm_engine.model_executor.driver_worker
    assert worker.model_runner.cache.key.dtype is E4M3
    assert worker.model_runner.parts.backend.name == "cuda"
    return llm.generate(prompts(6), GREEDY, use_tqdm=False)


@pytest.mark.parametrize(("backend", "dtype"), [("torch_native", "bfloat16"), ("auto", "float16"), ("auto", "float32")])
def test_other_kernels_and_dtypes_agree(backend: str, dtype: str, full: list[RequestOutput]) -> None:
    llm = LLM(MODEL, dtype=dtype, attention_backend=backend, **FP8)
    for ours, expected in zip(llm.generate(prompts(6), GREEDY, use_tqdm=False), full, strict=True):
        assert first_difference(ours, expected) <= TOLERANCE


def test_the_cpu_agrees(full: list[RequestOutput]) -> None:
    cpu = LLM(MODEL, device="cpu", dtype="float32", kv_cache_dtype="fp8", max_num_seqs=16)
    for ours, expected in zip(cpu.generate(prompts(6), GREEDY, use_tqdm=False), full, strict=True):
        assert first_difference(ours, expected) <= TOLERANCE


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation", "first_tokens"])
@pytest.mark.parametrize("chunk_device", ["cuda", "cpu"])
def test_ratio_one_is_full_prefill(selector: str, chunk_device: str, full: list[RequestOutput]) -> None:
    llm = LLM(MODEL, dtype="bfloat16", enable_blending=True, blend_chunk_device=chunk_device, **FP8)
    asked = prompts(6, blend_selector=selector, blend_recompute_ratio=1.0)
    for ours, expected in zip(llm.generate(asked, GREEDY, use_tqdm=False), full, strict=True):
        assert first_difference(ours, expected) <= TOLERANCE


FEATURES: dict[str, dict[str, Any]] = {
    "blend": {},
    "mean shift": {"blend_selector": "question_attention+mean_shift"},
    "eviction": {"enable_kvc": True, "target_compression_rate": 0.5},
    "offload": {"offload_mode": "exact", "offload_device_fraction": 0.2, "offload_predictor": "query_digest"},
    "graphs of steps": {"max_cudagraph_capture_size": 512},
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_answer(name: str) -> None:
    llm = LLM(MODEL, dtype="bfloat16", enable_blending=True, **FP8, **FEATURES[name])
    for output in llm.generate(prompts(4, blend_recompute_ratio=0.15), GREEDY, use_tqdm=False):
        assert output.error is None and output.blend is not None
        assert 0 < output.blend.num_recomputed_tokens < len(output.prompt_token_ids)
        assert output.outputs[0].text.strip()


def test_graphs_change_nothing() -> None:
    """Answers decoded with and without CUDA graphs, up to the end of the answer: what follows is arbitrary."""
    params = SamplingParams(temperature=0, max_tokens=16, stop=["\n"])
    texts = []
    for eager in (True, False):
        llm = LLM(MODEL, dtype="bfloat16", enforce_eager=eager, **FP8)
        texts.append([o.outputs[0].text for o in llm.generate(prompts(11), params, use_tqdm=False)])
    assert texts[0] == texts[1]
    assert all(texts[0])
