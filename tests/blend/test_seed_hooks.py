"""`cache_fuse_metadata`, `hack_kv` and `old_kvs`, used as scripts written for CacheBlend use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.blend.prompts import assert_counts_add_up, recomputed_positions
from tests.engine.compare import assert_identical, assert_logprobs_match, assert_same_logprobs, blend_of
from tests.engine.engines import (
    BLOCK_SIZE,
    DEMO,
    TINY_VOCABULARY,
    demo_prompt,
    engine,
    greedy,
    hf_model,
    pages_for,
    run,
    sampled,
    tiny_model,
)
from tests.models.tiny import HEAD_DIM
from vllm_blend import LLM, RequestOutput, SamplingParams

PARAMS = greedy(8, logprobs=3, ignore_eos=True)
OldKVs = list[list[torch.Tensor]]


def decoder_of(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner.model.model


def text_chunks(llm: LLM) -> tuple[list[str], str]:
    prompt = demo_prompt(2, passages=6)
    assert isinstance(prompt["suffix"], str)
    return [str(piece) for piece in (prompt["prefix"], *prompt["chunks"])], prompt["suffix"]


def test_the_example_script() -> None:
    """Step by step what CacheBlend's example does: chunks collected one prompt at a time, cut, joined, blended."""
    with engine() as llm:
        tokenizer = llm.get_tokenizer()
        llm.set_tokenizer(tokenizer)
        docs, question = text_chunks(llm)
        start_len = 1  # the BOS that the tokenizer puts before every prompt
        doc_chunk_ids = [tokenizer.encode(doc)[start_len:] for doc in docs]
        q_ids = tokenizer.encode(question)[start_len:]
        doc_chunk_ids = [*doc_chunk_ids, q_ids]
        last_len = len(q_ids)

        sampling_params = SamplingParams(temperature=0, max_tokens=1)
        model: Any = llm.llm_engine.model_executor.driver_worker.model_runner.model.model
        cache_fuse_metadata = model.cache_fuse_metadata
        cache_fuse_metadata["collect"] = True
        cache_fuse_metadata["check"] = False
        chunk_past_key_values: OldKVs = []
        for i, ids in enumerate(doc_chunk_ids):
            prompts = [str(tokenizer.decode(ids))]
            llm.generate(prompts, sampling_params, use_tqdm=False)
            for j, layer in enumerate(model.layers):
                past_key_values = layer.self_attn.hack_kv
                if i == 0:
                    temp_k = past_key_values[0][: start_len + len(ids)].clone()
                    temp_v = past_key_values[1][: start_len + len(ids)].clone()
                    chunk_past_key_values.append([temp_k, temp_v])
                else:
                    temp_k = past_key_values[0][start_len : len(ids) + start_len].clone()
                    temp_v = past_key_values[1][start_len : len(ids) + start_len].clone()
                    chunk_past_key_values[j][0] = torch.cat((chunk_past_key_values[j][0], temp_k), dim=0)
                    chunk_past_key_values[j][1] = torch.cat((chunk_past_key_values[j][1], temp_v), dim=0)
            model.old_kvs = chunk_past_key_values

        input_ids = [token for ids in doc_chunk_ids for token in ids]
        input_prompt = str(tokenizer.decode(input_ids))
        sampling_params = SamplingParams(temperature=0, max_tokens=10)
        cache_fuse_metadata["check"] = True
        cache_fuse_metadata["collect"] = False
        cache_fuse_metadata["suffix_len"] = last_len
        [blended] = llm.generate([input_prompt], sampling_params, use_tqdm=False)
        assert blended.metrics is not None
        assert blended.metrics.first_token_time is not None
        assert blended.metrics.first_scheduled_time is not None
        assert blended.metrics.first_token_time > blended.metrics.first_scheduled_time
        assert cache_fuse_metadata["check"] is False

        n = len(input_ids) + 1
        assert blended.prompt_token_ids == [tokenizer.bos_token_id, *input_ids]
        assert cache_fuse_metadata["org_seq_len"] == n
        chosen = recomputed_positions(llm, last_len)
        assert len(chosen) == int((n - last_len) * 0.16)
        assert chosen.dtype == torch.int64
        assert all(0 <= a < b < n - last_len for a, b in zip(chosen.tolist(), chosen.tolist()[1:], strict=False))
        assert len(cache_fuse_metadata["original_slot_mapping"]) == n
        assert len(cache_fuse_metadata["our_slot_mapping"]) == len(chosen) + last_len
        assert set(cache_fuse_metadata["our_slot_mapping"].tolist()) <= set(
            cache_fuse_metadata["original_slot_mapping"].tolist()
        )
        assert_counts_add_up(blended)

        cache_fuse_metadata["check"] = False
        cache_fuse_metadata["collect"] = False
        [full] = llm.generate([input_prompt], PARAMS, use_tqdm=False)
        assert full.blend is None
        assert_logprobs_match(full, hf_model(DEMO))


def collect(llm: LLM, ids: Sequence[int]) -> OldKVs:
    """K before RoPE and V of a prompt, per layer."""
    decoder = decoder_of(llm)
    decoder.cache_fuse_metadata.update(collect=True, check=False)
    run(llm, {"prompt_token_ids": list(ids)}, SamplingParams(temperature=0, max_tokens=1))
    decoder.cache_fuse_metadata["collect"] = False
    return [[tensor.clone() for tensor in layer.self_attn.hack_kv] for layer in decoder.layers]


def blend(llm: LLM, ids: Sequence[int], old_kvs: Any, params: Any = PARAMS, **settings: Any) -> RequestOutput:
    decoder = decoder_of(llm)
    decoder.old_kvs = old_kvs
    decoder.cache_fuse_metadata.update(check=True, **settings)
    return run(llm, {"prompt_token_ids": list(ids)}, params)[0]


TINY = tiny_model("llama")
WIDTH = 2 * HEAD_DIM  # channels of a token's K or V, all heads
IDS = [(11 * i * i + 5 * i + 2) % TINY_VOCABULARY for i in range(60)]
SUFFIX = 7


def stale(llm: LLM) -> OldKVs:
    """KV of two halves that never saw each other, which a blend of IDS has to repair."""
    halves = [collect(llm, IDS[:30]), collect(llm, IDS[30:])]
    return [[torch.cat(pair) for pair in zip(*layers, strict=True)] for layers in zip(*halves, strict=True)]


def test_collected_kv_is_that_of_the_prompt() -> None:
    with engine(TINY, max_num_batched_tokens=13, max_num_seqs=4) as pieces, engine(TINY) as whole:
        expected, collected = collect(whole, IDS), collect(pieces, IDS)
        reference = hf_model(TINY)
        k_proj = reference.model.layers[0].self_attn.k_proj
        with torch.no_grad():
            hidden = reference.model.layers[0].input_layernorm(reference.model.embed_tokens(torch.tensor(IDS)))
            tolerances.check_kv(collected[0][0], k_proj(hidden))
        for layer, other in zip(expected, collected, strict=True):
            for tensor, same in zip(layer, other, strict=True):
                assert tensor.shape == (len(IDS), WIDTH)
                tolerances.check_kv(tensor, same)


def test_a_prefix_in_the_cache_is_collected_too() -> None:
    with engine(TINY, block_size=BLOCK_SIZE) as llm:
        run(llm, {"prompt_token_ids": IDS}, greedy(1))
        assert collect(llm, IDS)[0][0].shape == (len(IDS), WIDTH)


def test_old_kvs_can_be_used_again() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        before = [[tensor.clone() for tensor in layer] for layer in old_kvs]
        first = blend(llm, IDS, old_kvs, suffix_len=SUFFIX)
        again = blend(llm, IDS, old_kvs, suffix_len=SUFFIX)
        assert blend_of(first) == blend_of(again)
        assert_identical(first, again)
        for layer, copy in zip(old_kvs, before, strict=True):
            assert all(torch.equal(now, then) for now, then in zip(layer, copy, strict=True))


def test_check_is_for_one_prompt() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        assert blend(llm, IDS, old_kvs, suffix_len=SUFFIX, recomp_ratio=0.0).blend is not None
        assert decoder_of(llm).cache_fuse_metadata["check"] is False
        [after] = run(llm, {"prompt_token_ids": IDS}, PARAMS)
        assert after.blend is None
        assert_logprobs_match(after, hf_model(TINY))


def test_in_a_batch_the_first_prompt_is_blended() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        alone = blend(llm, IDS, old_kvs, suffix_len=SUFFIX)
        decoder_of(llm).cache_fuse_metadata["check"] = True
        first, second = run(llm, [{"prompt_token_ids": IDS}, {"prompt_token_ids": IDS[:40]}], PARAMS)
        assert_same_logprobs(first, alone)
        assert second.blend is None
        assert_logprobs_match(second, hf_model(TINY))


def test_without_suffix_len_what_old_kvs_lacks_is_the_suffix() -> None:
    with engine(TINY) as llm:
        old_kvs = [[tensor[: -2 * SUFFIX] for tensor in layer] for layer in stale(llm)]
        collect(llm, [TINY_VOCABULARY - 1])  # the prompt collected last is not how this one ends
        decoder_of(llm).cache_fuse_metadata.pop("suffix_len")
        output = blend(llm, IDS, old_kvs, recomp_ratio=0.0)
        assert output.blend is not None
        assert output.blend.num_recomputed_tokens == 2 * SUFFIX


def test_without_suffix_len_the_question_collected_last_is_the_suffix() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        collect(llm, IDS[-SUFFIX:])
        output = blend(llm, IDS, old_kvs, recomp_ratio=0.0)
        assert output.blend is not None
        assert output.blend.num_recomputed_tokens == SUFFIX


def test_without_any_hint_the_last_token_is_the_suffix() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        collect(llm, [TINY_VOCABULARY - 1])
        output = blend(llm, IDS, old_kvs, recomp_ratio=0.0)
        assert output.blend is not None
        assert output.blend.num_recomputed_tokens == 1


def test_flat_rows_and_heads_are_the_same_old_kvs() -> None:
    with engine(TINY) as llm:
        flat = stale(llm)
        heads = [[tensor.view(len(IDS), 2, HEAD_DIM) for tensor in layer] for layer in flat]
        expected = blend(llm, IDS, flat, suffix_len=SUFFIX)
        chosen = recomputed_positions(llm, SUFFIX)
        assert_identical(blend(llm, IDS, heads, suffix_len=SUFFIX), expected)
        assert torch.equal(recomputed_positions(llm, SUFFIX), chosen)


def test_old_kvs_in_half_precision() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        half = [[tensor.bfloat16() for tensor in layer] for layer in old_kvs]
        rounded = [[tensor.float() for tensor in layer] for layer in half]
        expected = blend(llm, IDS, rounded, suffix_len=SUFFIX)
        assert_same_logprobs(blend(llm, IDS, half, suffix_len=SUFFIX), expected)


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_blends_with_small_steps(ratio: float) -> None:
    """A blend is one step, however small the steps of others are."""
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        expected = blend(llm, IDS, old_kvs, suffix_len=SUFFIX, recomp_ratio=ratio)
    with engine(TINY, max_num_batched_tokens=6, max_num_seqs=4) as small:
        output = blend(small, IDS, old_kvs, suffix_len=SUFFIX, recomp_ratio=ratio)
        assert_same_logprobs(output, expected)
        assert blend_of(output) == blend_of(expected)


def test_several_check_layers() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        context = len(IDS) - SUFFIX
        output = blend(llm, IDS, old_kvs, suffix_len=SUFFIX, check_layers=[1, 2], recomp_ratios=[0.5, 0.25])
        chosen = recomputed_positions(llm, SUFFIX).tolist()
        assert len(chosen) == int(0.25 * context)
        single = blend(llm, IDS, old_kvs, suffix_len=SUFFIX, check_layers=[1], recomp_ratios=[0.5])
        assert set(chosen) <= set(recomputed_positions(llm, SUFFIX).tolist())
        assert output.blend is not None
        assert single.blend is not None
        assert (output.blend.recompute_ratio, single.blend.recompute_ratio) == (0.25, 0.5)


def test_several_completions_of_a_blended_prompt() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        output = blend(llm, IDS, old_kvs, sampled(6, n=3, seed=4, logprobs=1, ignore_eos=True), suffix_len=SUFFIX)
        alone = blend(llm, IDS, old_kvs, sampled(6, seed=4, logprobs=1, ignore_eos=True), suffix_len=SUFFIX)
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
        output.outputs = output.outputs[:1]
        assert_same_logprobs(alone, output)
        assert blend_of(output) == blend_of(alone)


def wrong(old_kvs: OldKVs) -> dict[str, tuple[Any, str]]:
    """Broken copies of `old_kvs`, and what the error must say."""
    n = len(IDS)
    short = [[tensor[: n - SUFFIX - 1] for tensor in layer] for layer in old_kvs]
    long = [[torch.cat([tensor, tensor[:1]]) for tensor in layer] for layer in old_kvs]
    ragged = [list(layer) for layer in old_kvs]
    ragged[2][1] = ragged[2][1][:-3]
    narrow = [list(layer) for layer in old_kvs]
    narrow[1][0] = narrow[1][0][:, :-1]
    single = [list(layer) for layer in old_kvs]
    single[1] = single[1][:1]
    return {
        "no layers": ([], "old_kvs has 0 layers, the model has 3"),
        "too few layers": (old_kvs[:2], "old_kvs has 2 layers, the model has 3"),
        "too few tokens": (short, rf"old_kvs covers {n - SUFFIX - 1} tokens.*prompt has {n}.*last {SUFFIX}"),
        "too many tokens": (long, rf"old_kvs covers {n + 1} tokens.*prompt has {n}"),
        "a shorter layer": (ragged, rf"old_kvs\[2\]: V is \[{n - 3}, {WIDTH}\], expected \[{n}, {WIDTH}\]"),
        "a narrow layer": (narrow, rf"old_kvs\[1\]: K is \[{n}, {WIDTH - 1}\], expected \[{n}, {WIDTH}\]"),
        "no V": (single, r"old_kvs\[1\] must be \[K, V\], got 1"),
        "nothing collected": ([[None, None]] * 3, r"old_kvs\[0\]: K is None, not a floating-point tensor"),
        "an empty layer": ([[], [], []], r"old_kvs\[0\] must be \[K, V\], got 0"),
        "whole numbers": (
            [[t.long() for t in layer] for layer in old_kvs],
            r"old_kvs\[0\]: K is torch.int64, not a floating",
        ),
    }


@pytest.mark.parametrize("fault", list(wrong([[torch.zeros(60, WIDTH)] * 2] * 3)))
def test_old_kvs_that_do_not_fit(fault: str) -> None:
    """The error names the layer and the lengths; nothing was scheduled, and the engine goes on."""
    with engine(TINY) as llm:
        old_kvs, message = wrong(stale(llm))[fault]
        with pytest.raises(ValueError, match=message):
            blend(llm, IDS, old_kvs, suffix_len=SUFFIX)
        decoder_of(llm).cache_fuse_metadata["check"] = False
        [output] = run(llm, {"prompt_token_ids": IDS}, PARAMS)
        assert_logprobs_match(output, hf_model(TINY))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"suffix_len": 0}, "suffix_len=0 must be between 1 and"),
        ({"suffix_len": 61}, "suffix_len=61 must be between 1 and the prompt's 60"),
        ({"suffix_len": "7"}, "suffix_len='7'"),
        ({"recomp_ratio": 1.2}, r"recomp_ratio=1\.2 is a share"),
        ({"recomp_ratios": [0.5, -1], "check_layers": [1, 2]}, r"recompute_ratios\[1\]=-1 is a share"),
        ({"recomp_ratios": [0.5], "check_layers": [1, 2]}, "has 1 entries for 2 check layers"),
        ({"recomp_ratios": [0.2, 0.5], "check_layers": [1, 2]}, r"\[0\.2, 0\.5\] rise"),
        ({"check_layers": [3]}, r"check_layers=\[3\].*layers 0\.\.2"),
        ({"check_layers": [0]}, r"check_layers=\[0\].*from 1 on"),
        ({"check_layers": [2, 1], "recomp_ratios": [0.5, 0.2]}, r"check_layers=\[2, 1\].*ascending"),
        ({"selector": "nonesuch"}, "'nonesuch' is unknown.*value_deviation"),
        ({"collect": True}, "collect and check"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        with pytest.raises(ValueError, match=message):
            blend(llm, IDS, old_kvs, **{"suffix_len": SUFFIX, **settings})


def test_a_blend_has_no_prompt_logprobs() -> None:
    with engine(TINY) as llm:
        old_kvs = stale(llm)
        with pytest.raises(ValueError, match="prompt_logprobs needs every prompt token"):
            blend(llm, IDS, old_kvs, greedy(2, prompt_logprobs=1), suffix_len=SUFFIX)


def test_broken_old_kvs_fail_alone() -> None:
    """NaN spoils its own request only: neither its batch mates nor the next owners of its pages are affected."""
    with engine(TINY, **pages_for(96)) as llm:
        broken = [[torch.full_like(tensor, torch.nan) for tensor in layer] for layer in stale(llm)]
        decoder_of(llm).old_kvs = broken
        decoder_of(llm).cache_fuse_metadata.update(check=True, suffix_len=SUFFIX, recomp_ratio=0.0)
        mates = [{"prompt_token_ids": IDS[:n]} for n in (17, 20, 22)]  # decoded together, soon on pages of the first
        outputs = run(llm, [{"prompt_token_ids": IDS}, *mates], greedy(20, logprobs=2, ignore_eos=True))
        assert outputs[0].error is not None
        assert "NaN" in outputs[0].error
        assert outputs[0].outputs[0].finish_reason == "error"
        for output in outputs[1:]:
            assert_logprobs_match(output, hf_model(TINY))
