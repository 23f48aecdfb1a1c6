"""An engine whose linear layers keep the 4-bit weights of a checkpoint on a GPU: answers, graphs and memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.answers import differences
from tests.gpu.awq_models import quantize_model, write_random_model
from tests.gpu.test_engine import GREEDY, MODEL, SMALL, TOLERANCE, first_difference, prompts
from tests.models.int4_models import WIDE
from tests.models.quantized import IN_WIDE_GROUPS, save_quantized
from vllm_blend import LLM, RequestOutput
from vllm_blend.layers.linear import Linear
from vllm_blend.models.loader import load_hf_config, load_model
from vllm_blend.ops import Int4Tiles, unpack_tiles

pytestmark = pytest.mark.gpu
BF16: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
LIMIT = TOLERANCE["bfloat16"]


@pytest.fixture(scope="module", params=[32, 128])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("awq")
    quantize_model(Path(MODEL), folder, request.param)
    return str(folder)


@pytest.fixture(scope="module")
def dequantized(model: str) -> Iterator[list[RequestOutput]]:
    llm = LLM(model, dequantize_weights=True, enable_prefix_caching=False, **BF16, **SMALL)
    assert all(layer.int4 is None for layer in linear_layers(llm))
    yield llm.generate(prompts(11), GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    torch.cuda.empty_cache()


def linear_layers(llm: LLM) -> list[Linear]:
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    return [module for module in model.get_submodule("").modules() if isinstance(module, Linear)]


def largest_difference(a: RequestOutput, b: RequestOutput) -> float:
    return max(abs(each) for position in differences(a.outputs[0], b.outputs[0]) for each in position)


def test_it_answers_as_the_dequantized_model(model: str, dequantized: list[RequestOutput]) -> None:
    """The weights are the same numbers: prompts are multiplied by unpacked matrices, decode rows by PyTorch's kernel in
    CUDA graphs."""
    llm = LLM(model, enable_prefix_caching=False, **BF16, **SMALL)
    assert all(isinstance(layer.int4, Int4Tiles) and layer.weight.numel() == 0 for layer in linear_layers(llm))
    assert llm.llm_engine.model_executor.driver_worker.model_runner.block_pass.decode_graphs is not None
    for ours, expected in zip(llm.generate(prompts(11), GREEDY, use_tqdm=False), dequantized, strict=True):
        assert largest_difference(ours, expected) <= LIMIT


def test_graphs_change_nothing(model: str) -> None:
    """With batch sizes between buckets, and with more rows than PyTorch's kernel multiplies. Graphs have more rows than
    a batch, which cuBLAS may multiply by another kernel, so that an answer to which two tokens are alike may differ."""
    texts = []
    settings = SMALL | {"max_num_seqs": 64}
    asked = [*prompts(11), *prompts(48)]
    for eager in (True, False):
        llm = LLM(model, enforce_eager=eager, **BF16, **settings)
        texts.append([output.outputs[0].text.split("\n")[0] for output in llm.generate(asked, GREEDY, use_tqdm=False)])
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 0.9 * len(asked), texts
    assert all(texts[0])


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation"])
def test_ratio_one_is_full_prefill(selector: str, model: str, dequantized: list[RequestOutput]) -> None:
    llm = LLM(model, enable_blending=True, **BF16, **SMALL)
    asked = prompts(11, blend_selector=selector, blend_recompute_ratio=1.0)
    for ours, expected in zip(llm.generate(asked, GREEDY, use_tqdm=False), dequantized, strict=True):
        assert first_difference(ours, expected) <= LIMIT


def test_float16_is_dequantized_and_told(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(model, device="cuda", dtype="float16", **SMALL)
    assert all(layer.int4 is None for layer in linear_layers(llm))
    assert any("(dtype='bfloat16' keeps the 4 bits)" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", IN_WIDE_GROUPS)
def test_every_format_is_loaded(name: str, tmp_path: Path) -> None:
    """Within the rounding of scales and of zero points to bfloat16."""
    save_quantized(tmp_path, name, in_wide_groups=True, **WIDE)
    config = load_hf_config(str(tmp_path))
    kept, dequantized = (
        load_model(config, str(tmp_path), torch.bfloat16, "cuda", max_position=64, keeps_int4=keeps).get_submodule("")
        for keeps in (True, False)
    )
    layers = {path: layer for path, layer in kept.named_modules() if isinstance(layer, Linear)}
    assert layers
    for path, layer in layers.items():
        weight = dequantized.get_submodule(path).weight
        assert isinstance(layer.int4, Int4Tiles) and isinstance(weight, torch.Tensor)
        assert (unpack_tiles(layer.int4).float() - weight.float()).abs().max() < weight.abs().max() / 80


LAYERS, HIDDEN, INTERMEDIATE, GROUP = 6, 2048, 8192, 128
NUMBERS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
LARGEST = 2 * HIDDEN * INTERMEDIATE  # of a layer's matrices: gate and up as one


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("large")
    write_random_model(Path(MODEL), folder, LAYERS, HIDDEN, INTERMEDIATE, GROUP)
    return str(folder)


def test_loading_never_holds_the_model_in_16_bits(large: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(load_hf_config(large), large, torch.bfloat16, "cuda", max_position=64, keeps_int4=True)
    peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    in_4_bits = NUMBERS // 2 + NUMBERS // GROUP * 4
    assert in_4_bits <= kept <= 1.02 * in_4_bits + 16 * 2**20  # the embedding, norms and tables
    assert peak <= kept + 12 * LARGEST < 2 * NUMBERS  # the numbers of one matrix on their way
    del model


def test_the_unpacked_matrix_is_counted_as_memory_of_a_step(large: str) -> None:
    """The step has few rows, so that nothing else of it is as large."""
    options: dict[str, Any] = {
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "max_model_len": 128,
        "gpu_memory_utilization": 0.3,
    }
    options |= {"enforce_eager": True, "enable_blending": False}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()  # by what other tests keep: it counts as weights
    llm = LLM(large, **options, **BF16)
    memory = llm.llm_engine.model_executor.driver_worker.memory
    assert memory is not None and memory.activations >= 2 * LARGEST
    assert memory.weights - before < NUMBERS
