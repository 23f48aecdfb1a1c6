"""A KV cache of e4m3: what it answers, and that all ways through the engine answer alike.

What rounds K and V to eight bits is compared with transformers that do the same in float64, and, loosely, with
transformers that do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.blend.prompts import plain, tiny_prompt
from tests.engine.compare import assert_identical
from tests.engine.e4m3_reference import FP8, PARAMS, assert_near, differences, rounded_model
from tests.engine.engines import (
    BLOCK_SIZE,
    DEMO,
    TINY_VOCABULARY,
    demo_prompt,
    engine,
    greedy,
    hf_model,
    ids_of,
    new_llm,
    pages_for,
    run,
    threads,
    tiny_model,
)
from tests.models.tiny import FAMILIES
from vllm_blend import LLM
from vllm_blend.blend.selectors import SELECTORS
from vllm_blend.ops.e4m3 import E4M3

pytestmark = pytest.mark.cpu_only
WATCHED = greedy(8, logprobs=3, prompt_logprobs=3, ignore_eos=True)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen3": {},
    **{family: {} for family in FAMILIES},
}
RULES = sorted(name for name, selector in SELECTORS.items() if selector.fixed_ratio is None)
WAYS: dict[str, dict[str, Any]] = {
    "plain torch": {"attention_backend": "torch_native"},
    "small pieces": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "pages for one request": pages_for(96),
    "one by one": {"max_num_seqs": 1, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_rounded_keys_and_values(name: str, backend: str) -> None:
    directory = tiny_model(name, **MODELS[name])
    with engine(directory, attention_backend=backend, **FP8) as llm:
        [output] = run(llm, plain(tiny_prompt()), WATCHED)
        moved, lost = differences(output, rounded_model(llm, directory)), differences(output, hf_model(directory))
    # A number near a midpoint may be rounded the other way than in float64: that moves few log-probabilities.
    assert moved.abs().median() < 1e-4 and moved.square().mean().sqrt() < 0.01 and moved.abs().max() < 0.1
    assert lost.abs().median() > 100 * moved.abs().median(), "nothing was rounded"


def test_the_demo_model_stays_near_to_itself() -> None:
    """Rounded to three bits, K and V of a trained model answer what they answered."""
    reference = hf_model(DEMO)
    with engine(**FP8) as llm:
        prompts = [{"prompt_token_ids": ids_of(llm, demo_prompt(index))} for index in range(4)]
        for output in run(llm, prompts, WATCHED):
            lost = differences(output, reference)
            assert lost.abs().median() < 0.01 and lost.square().mean().sqrt() < 0.15
            assert all(one.rank == 1 for entry in output.outputs[0].logprobs or () for one in list(entry.values())[:1])


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
@pytest.mark.parametrize("rule", [*RULES, "full"])
def test_ratio_1_is_full_prefill(rule: str, backend: str) -> None:
    directory = tiny_model("llama")
    with engine(directory, enable_blending=True, attention_backend=backend, **FP8) as llm:
        [whole] = run(llm, plain(tiny_prompt()), PARAMS)
        for _ in range(2):
            [output] = run(llm, tiny_prompt(blend_selector=rule, blend_recompute_ratio=1.0), PARAMS)
            assert_near(output, whole)
            assert output.blend is not None and output.blend.num_reused_tokens == 0


@pytest.mark.parametrize("way", WAYS)
def test_every_way_through_the_engine(way: str) -> None:
    """Batches, pieces, prefixes in the cache, preemption: each request answers as it does alone."""
    directory = tiny_model("llama")
    shared = [(11 * i) % TINY_VOCABULARY for i in range(24)]
    prompts = [
        {"prompt_token_ids": [*shared[: 8 * (i % 4)], *((7 * j * j + i) % TINY_VOCABULARY for j in range(9 + 11 * i))]}
        for i in range(5)
    ]
    with engine(directory, **FP8) as llm:
        alone = [run(llm, prompt, PARAMS)[0] for prompt in prompts]
    with engine(directory, **(FP8 | WAYS[way])) as llm:
        for _ in range(2):
            for output, expected in zip(run(llm, prompts, PARAMS), alone, strict=True):
                assert_near(output, expected)
        assert (llm.llm_engine.scheduler.num_preemptions > 0) == (way == "pages for one request")


@pytest.mark.parametrize("rule", ["none", "value_deviation", "question_attention", "question_attention(mean_shift=0)"])
def test_blends_in_a_batch_are_those_alone(rule: str) -> None:
    prompts = [demo_prompt(index, 5, blend_selector=rule) for index in range(3)]
    with engine(enable_blending=True, **FP8) as llm:
        alone = [run(llm, prompt, PARAMS)[0] for prompt in prompts]
        together = run(llm, prompts, PARAMS)
        for output, expected in zip(together, alone, strict=True):
            assert_near(output, expected)
            assert output.blend is not None and output.blend.num_reused_tokens > 0


def test_what_a_rule_sees_is_in_the_units_of_the_model() -> None:
    """Deviations choose most of the tokens that they choose with a cache of the model's dtype."""
    chosen = []
    for cache in ({}, FP8):
        with engine(DEMO, enable_blending=True, **({"block_size": BLOCK_SIZE} | cache)) as llm:
            run(llm, demo_prompt(3, 6, blend_selector="value_deviation"), PARAMS)
            chosen.append(set(llm.llm_engine.decoder.cache_fuse_metadata["imp_indices"].tolist()))
    assert len(chosen[0] & chosen[1]) >= 0.6 * len(chosen[0])


def scaled_copy(directory: str, to: Path, keys: int = 11, values: int = -12) -> str:
    """Write the same model with keys 2**keys times as large and values 2**values times, which changes no answer:
    neither is within the range of e4m3 any more."""
    for file in Path(directory).iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(Path(directory) / "model.safetensors")
    for name, exponent in (("k_proj", keys), ("q_proj", -keys), ("v_proj", values), ("o_proj", -values)):
        for key in tensors:
            if f"{name}.weight" in key:
                tensors[key] = tensors[key] * 2.0**exponent
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


def test_heads_out_of_range_are_scaled_into_it(tmp_path: Path) -> None:
    directory = tiny_model("llama")
    moved = scaled_copy(directory, tmp_path)
    prompt = tiny_prompt(blend_selector="value_deviation", blend_recompute_ratio=0.3)
    with engine(directory, enable_blending=True, **FP8) as llm:
        plain_output, blended = run(llm, [plain(prompt), prompt], PARAMS)
    llm = new_llm(moved, enable_blending=True, **FP8)
    layers: Any = llm.llm_engine.decoder.layers
    assert all(layer.self_attn.attn.kv_scales is not None for layer in layers)
    for output, expected in zip(run(llm, [plain(prompt), prompt], PARAMS), (plain_output, blended), strict=True):
        assert_near(output, expected)  # in other units, so other numbers are near a midpoint
    for layer in layers:
        layer.self_attn.attn.kv_scales = None
    llm.reset_prefix_cache()
    [output] = run(llm, [plain(prompt)], PARAMS)
    assert output.outputs[0].token_ids != plain_output.outputs[0].token_ids, "scales made no difference"


def with_heads_scaled(directory: str, to: Path) -> str:
    """Write the same model with the keys and values of each KV head times a power of 16 of its own."""
    scaled_copy(directory, to, 0, 0)
    tensors = load_file(to / "model.safetensors")
    keys, values = torch.tensor([2.0**12, 2.0**-12]), torch.tensor([2.0**-12, 2.0**8])
    for name, tensor in tensors.items():
        for part, factors in (("q_proj", 1 / keys), ("k_proj", keys), ("v_proj", values)):
            if f"{part}.weight" in name:
                tensors[name] = (tensor.unflatten(0, (2, -1)) * factors[:, None, None]).flatten(0, 1)
        if "o_proj.weight" in name:
            tensors[name] = (tensor.unflatten(1, (2, -1)) / values[:, None]).flatten(1)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return str(to)


@pytest.mark.parametrize("backend", ["cpu", "torch_native"])
def test_heads_in_units_of_their_own_change_no_bit(backend: str, tmp_path: Path) -> None:
    """Scales are powers of 16, so a head that is as many times as large has the same bytes in its pages."""
    rules = ["none", "first_tokens", "question_attention(mean_shift=0)", "question_attention"]
    prompts = [plain(tiny_prompt()), *(tiny_prompt(blend_selector=rule) for rule in rules)]
    found = []
    for directory in (tiny_model("llama"), with_heads_scaled(tiny_model("llama"), tmp_path)):
        llm = new_llm(directory, enable_blending=True, attention_backend=backend, **FP8)
        with threads(1):
            found.append([run(llm, prompt, PARAMS)[0] for prompt in prompts])
    layers: Any = llm.llm_engine.decoder.layers
    scales = layers[0].self_attn.attn.kv_scales
    assert scales.k.tolist() == [2.0**12, 2.0**-12] and scales.v.tolist() == [2.0**-12, 2.0**8]
    for output, expected in zip(*found, strict=True):
        assert_identical(output, expected)


def test_scales_are_within_the_range_of_float16(tmp_path: Path) -> None:
    """What is divided by 2**-16 is multiplied by 2**16, which float16 does not hold."""
    directory = scaled_copy(tiny_model("llama"), tmp_path, 0, -15)
    [output] = run(new_llm(directory, dtype="float16", **FP8), plain(tiny_prompt()), WATCHED)
    assert differences(output, hf_model(tiny_model("llama"))).square().mean().sqrt() < 0.5


def collect(llm: LLM, ids: list[int]) -> list[list[torch.Tensor]]:
    decoder: Any = llm.llm_engine.decoder
    decoder.cache_fuse_metadata["collect"] = True
    run(llm, {"prompt_token_ids": ids}, greedy(1))
    decoder.cache_fuse_metadata["collect"] = False
    return [layer.self_attn.hack_kv for layer in decoder.layers]


def test_hooks_have_the_dtype_and_the_units_of_the_model(tmp_path: Path) -> None:
    directory = scaled_copy(tiny_model("llama"), tmp_path)
    ids = plain(tiny_prompt())["prompt_token_ids"]
    fp8, full = (new_llm(directory, block_size=BLOCK_SIZE, kv_cache_dtype=dtype) for dtype in ("fp8", "auto"))
    assert fp8.llm_engine.decoder.cache_fuse_metadata["kv_cache_dtype"] is E4M3
    collected, expected = collect(fp8, ids), collect(full, ids)
    for layer, (mine, theirs) in enumerate(zip(collected, expected, strict=True)):
        for x, y in zip(mine, theirs, strict=True):
            assert x.dtype == torch.float32 and x.shape == y.shape
            assert (x - y).norm() < (1e-5 if layer == 0 else 0.2) * y.norm()  # layer 0 has seen no page yet
    decoder = fp8.llm_engine.decoder
    [whole] = run(fp8, {"prompt_token_ids": ids}, PARAMS)
    for ratio in (1.0, 0.0):
        decoder.old_kvs = expected
        decoder.cache_fuse_metadata.update(check=True, recomp_ratio=ratio, suffix_len=6)
        [output] = run(fp8, {"prompt_token_ids": ids}, PARAMS)
        assert output.blend is not None and (output.blend.num_reused_tokens == 0) == (ratio == 1.0)
        if ratio == 1.0:
            assert_near(output, whole)
    decoder.old_kvs = collected  # its own, unrounded: reused, they are what is in the pages
    decoder.cache_fuse_metadata.update(check=True, recomp_ratio=0.0, suffix_len=6)
    [first] = run(fp8, {"prompt_token_ids": ids}, PARAMS)
    assert_near(first, whole)
    decoder.cache_fuse_metadata.update(check=True)
    [again] = run(fp8, {"prompt_token_ids": ids}, PARAMS)
    assert_identical(first, again)
