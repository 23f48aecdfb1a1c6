"""What must be exact: recomputing everything is full prefill, and a true prefix needs no repair."""

from __future__ import annotations

from typing import Any

import pytest

from tests import settings
from tests.blend.prompts import assert_counts_add_up, plain, tiny_prompt
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import (
    BLOCK_SIZE,
    DEMO,
    demo_prompt,
    engine,
    greedy,
    hf_model,
    ids_of,
    run,
    tiny_model,
)
from tests.models.tiny import FAMILIES
from vllm_blend import LLM, RequestOutput
from vllm_blend.blend.selectors import SELECTORS

PARAMS = greedy(4, logprobs=3, ignore_eos=True)
RULES = sorted(name for name, selector in SELECTORS.items() if selector.fixed_ratio is None)
TINY: dict[str, Any] = {
    "llama": tiny_model("llama"),
    "mistral-window": tiny_model("mistral", sliding_window=20),
    "qwen2": tiny_model("qwen2"),
    "qwen3": tiny_model("qwen3"),
}


@pytest.mark.parametrize("backend", settings.current().backends)
@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("rule", [*RULES, "full"])
def test_ratio_1_is_full_prefill(rule: str, model: str, backend: str) -> None:
    arguments = {"attention_backend": backend, "block_size": BLOCK_SIZE}
    with engine(TINY[model], enable_blending=True, **arguments) as llm:
        for _ in range(2):  # the chunks are new, then known
            [output] = run(llm, tiny_prompt(blend_selector=rule, blend_recompute_ratio=1.0), PARAMS)
            assert_logprobs_match(output, hf_model(TINY[model]))
            assert_counts_add_up(output)
            assert output.blend is not None
            assert output.blend.selector == rule
            assert output.blend.num_reused_tokens == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_1_is_full_prefill_in_other_families(family: str) -> None:
    directory = tiny_model(family)
    with engine(directory, enable_blending=True, block_size=BLOCK_SIZE) as llm:
        for rule in [*RULES, "full"]:
            [output] = run(llm, tiny_prompt(blend_selector=rule, blend_recompute_ratio=1.0), PARAMS)
            assert_logprobs_match(output, hf_model(directory))
            assert output.blend is not None
            assert output.blend.num_reused_tokens == 0


def test_ratio_1_is_full_prefill_on_the_demo_model() -> None:
    with engine() as unblended:
        expected = run(unblended, {"prompt_token_ids": ids_of(unblended, demo_prompt(11, passages=6))}, PARAMS)[0]
    with engine(enable_blending=True) as llm:
        for rule in [*RULES, "full"]:
            [output] = run(llm, demo_prompt(11, passages=6, blend_selector=rule, blend_recompute_ratio=1.0), PARAMS)
            assert_same_logprobs(output, expected)


@pytest.mark.parametrize("rule", [*RULES, "full"])
@pytest.mark.parametrize("model", TINY)
def test_ratio_1_with_old_kvs_is_full_prefill(rule: str, model: str) -> None:
    """It is, whatever rubbish the reused KV holds."""
    with engine(TINY[model]) as llm:
        ids = plain(tiny_prompt())["prompt_token_ids"]
        hooks = llm.llm_engine.decoder.cache_fuse_metadata
        hooks["collect"] = True
        run(llm, {"prompt_token_ids": ids[::-1]}, greedy(1))
        layers: Any = llm.llm_engine.decoder.layers
        llm.llm_engine.decoder.old_kvs = [layer.self_attn.hack_kv for layer in layers]
        hooks.update(collect=False, check=True, suffix_len=6, recomp_ratio=1.0, selector=rule)
        [output] = run(llm, {"prompt_token_ids": ids}, PARAMS)
        assert_logprobs_match(output, hf_model(TINY[model]))
        assert hooks["imp_indices"].tolist() == list(range(len(ids)))
        assert output.blend is not None
        assert (output.blend.num_reused_tokens, output.blend.num_recomputed_tokens) == (0, len(ids))


@pytest.mark.parametrize("layers", [[1], [2], [1, 2]])
def test_ratio_1_at_any_check_layer(layers: list[int]) -> None:
    ratios = [1.0] * len(layers)
    arguments: dict[str, Any] = {"blend_check_layers": layers, "blend_recompute_ratios": ratios}
    with engine(TINY["llama"], enable_blending=True, blend_selector="value_deviation", **arguments) as llm:
        [output] = run(llm, tiny_prompt(), PARAMS)
        assert_logprobs_match(output, hf_model(TINY["llama"]))


def test_none_recomputes_nothing_and_cannot_be_told_to() -> None:
    with engine(TINY["llama"], enable_blending=True) as llm:
        with pytest.raises(ValueError, match=r"'none' always recomputes a share of 0.0.*blend_recompute_ratio=1.0"):
            run(llm, tiny_prompt(blend_selector="none", blend_recompute_ratio=1.0), PARAMS)
        [output] = run(llm, tiny_prompt(blend_selector="none"), PARAMS)
        assert_counts_add_up(output)
        assert output.blend is not None
        assert output.blend.num_recomputed_tokens == len(tiny_prompt()["suffix"])


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", TINY)
def test_a_true_prefix_is_exact_at_any_ratio(model: str, rule: str, ratio: float) -> None:
    prompt = tiny_prompt(blend_selector=rule, blend_recompute_ratio=ratio)
    prompt["chunks"] = prompt["chunks"][2:3]
    with engine(TINY[model], enable_blending=True) as llm:
        [output] = run(llm, prompt, PARAMS)
        assert_logprobs_match(output, hf_model(TINY[model]))
        assert_counts_add_up(output)
        assert output.blend is not None
        assert output.blend.num_encoded_tokens == len(prompt["prefix"]) + len(prompt["chunks"][0])
        assert output.blend.num_recomputed_tokens == len(prompt["suffix"])


def test_a_true_prefix_without_anything_before_it() -> None:
    prompt = {**tiny_prompt(), "prefix": [], "chunks": tiny_prompt()["chunks"][2:3]}
    with engine(TINY["llama"], enable_blending=True, blend_recompute_ratio=0.0) as llm:
        [output] = run(llm, prompt, PARAMS)
        assert_logprobs_match(output, hf_model(TINY["llama"]))
        assert_counts_add_up(output)


def test_the_demo_model_answers_alike_over_one_chunk() -> None:
    with engine(enable_blending=True, blend_selector="none") as llm:
        prompt = demo_prompt(5, passages=1)
        [output] = run(llm, prompt, PARAMS)
        assert_logprobs_match(output, hf_model(DEMO))


@pytest.mark.parametrize("options", [{}, {"enable_blending": True}, {"enable_blending": True, "blend_min_tokens": 999}])
def test_without_chunks_or_blending_a_chunked_prompt_is_a_plain_one(options: dict[str, Any]) -> None:
    prompt = tiny_prompt()
    if options == {"enable_blending": True}:
        prompt["chunks"] = []
    with engine(TINY["llama"], **options) as llm:
        expected, first, again = (run(llm, each, PARAMS)[0] for each in (plain(prompt), prompt, prompt))
        assert expected.prompt_token_ids == first.prompt_token_ids
        assert first.blend is None
        assert_same_logprobs(first, expected)
        assert again.num_cached_tokens == (len(first.prompt_token_ids) - 1) // 16 * 16
        assert len(llm.llm_engine.chunk_store) == 0


def test_blended_pages_never_enter_the_prefix_cache() -> None:
    prompt = tiny_prompt(blend_selector="none")
    with engine(TINY["llama"], enable_blending=True, block_size=BLOCK_SIZE) as llm:
        run(llm, prompt, PARAMS)
        [output] = run(llm, plain(prompt), PARAMS)
        assert output.num_cached_tokens == 0
        assert_logprobs_match(output, hf_model(TINY["llama"]))


def test_an_engine_without_prefix_caching_blends_alike() -> None:
    prompt = tiny_prompt(blend_selector="question_attention", blend_recompute_ratio=0.3)

    def outcome(llm: LLM) -> RequestOutput:
        return run(llm, prompt, PARAMS)[0]

    with engine(TINY["llama"], enable_blending=True) as cached:
        expected = outcome(cached)
    with engine(TINY["llama"], enable_blending=True, enable_prefix_caching=False) as uncached:
        assert_same_logprobs(outcome(uncached), expected)
