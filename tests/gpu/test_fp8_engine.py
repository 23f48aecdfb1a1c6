"""An engine with FP8 linear layers on a GPU: it answers, blends exactly at ratio 1, and keeps no 16-bit weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.test_engine import GREEDY, MODEL, SMALL, first_difference, prompts
from tests.ops_gpu.reference import FP8_PRODUCTS
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.layers.linear import Linear
from vllm_blend.models.loader import load_hf_config, load_model

pytestmark = [pytest.mark.gpu, FP8_PRODUCTS]

# Of the first token's log-probabilities. A blend multiplies in other shapes than a full prefill, and where that changes
# the last bit of bfloat16, what it is rounded to in e4m3 changes by up to 1/8 of it.
TOLERANCE = 1.0


@pytest.fixture(scope="module")
def full() -> Iterator[list[RequestOutput]]:
    llm = LLM(MODEL, device="cuda", quantization="fp8", enable_prefix_caching=False, **SMALL)
    yield llm.generate(prompts(8), GREEDY, use_tqdm=False)
    torch.cuda.empty_cache()


def test_it_answers_as_the_model_in_bfloat16(full: list[RequestOutput]) -> None:
    llm = LLM(MODEL, device="cuda", dtype="bfloat16", enable_prefix_caching=False, **SMALL)
    expected = llm.generate(prompts(8), GREEDY, use_tqdm=False)
    # Compare up to the end of the answer: what follows is arbitrary, here as in the test of graphs below.
    answers = [tuple(o.outputs[0].text.split("\n")[0] for o in pair) for pair in zip(full, expected, strict=True)]
    assert sum(a == b for a, b in answers) >= 6, answers
    assert any(first_difference(a, b) > 0 for a, b in zip(full, expected, strict=True))


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation"])
def test_ratio_one_is_its_own_full_prefill(selector: str, full: list[RequestOutput]) -> None:
    llm = LLM(MODEL, device="cuda", quantization="fp8", enable_blending=True, **SMALL)
    asked = prompts(8, blend_selector=selector, blend_recompute_ratio=1.0)
    differences = [
        first_difference(ours, expected)
        for ours, expected in zip(llm.generate(asked, GREEDY, use_tqdm=False), full, strict=True)
    ]
    assert max(differences) <= TOLERANCE, differences


def test_a_partial_blend_answers() -> None:
    llm = LLM(MODEL, device="cuda", quantization="fp8", enable_blending=True, **SMALL)
    for output in llm.generate(prompts(4, blend_recompute_ratio=0.15), GREEDY, use_tqdm=False):
        assert output.error is None
        assert output.blend is not None
        assert 0 < output.blend.num_recomputed_tokens < len(output.prompt_token_ids)
        assert output.outputs[0].text.strip()


def test_graphs_change_nothing() -> None:
    """Answers decoded with and without CUDA graphs, batch sizes between buckets included.

    They are compared up to the end of the answer: what a question-answering model makes up after it is arbitrary.
    """
    params = SamplingParams(temperature=0, max_tokens=16, stop=["\n"])
    texts = []
    for eager in (True, False):
        llm = LLM(MODEL, device="cuda", quantization="fp8", enforce_eager=eager, **SMALL)
        assert (llm.llm_engine.model_executor.driver_worker.model_runner.block_pass.decode_graphs is None) is eager
        texts.append([o.outputs[0].text for o in llm.generate(prompts(11), params, use_tqdm=False)])
    assert texts[0] == texts[1]
    assert all(texts[0])


def test_loading_never_holds_the_model_in_16_bits(tmp_path: Path) -> None:
    config = json.loads(Path(MODEL, "config.json").read_text())
    config |= {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 16}
    config |= {"head_dim": 128, "num_key_value_heads": 16, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load_model(
        load_hf_config(str(tmp_path)), str(tmp_path), torch.bfloat16, "cuda", "dummy", max_position=64,
        quantization="fp8",
    )  # fmt: skip
    peak, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    weights = [p.numel() for m in model.get_submodule("").modules() if isinstance(m, Linear) for p in m.parameters()]
    assert sum(weights) <= kept <= 1.02 * sum(weights) + 2**20
    assert peak <= kept + 3 * max(weights) + 2**20  # one matrix in bfloat16, and quantised before it is copied
