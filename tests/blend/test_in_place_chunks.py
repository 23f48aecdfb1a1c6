"""Chunks that are computed where they stand unless they are stored: holes of a blend, and nothing in the store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.blend.prompts import assert_counts_add_up, plain, recomputed_positions, tiny_prompt
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import close_store, engine, greedy, hf_model, new_llm, run, tiny_model

TINY = tiny_model("llama")
PARAMS = greedy(8, logprobs=2, ignore_eos=True)
ALL = [0, 1, 2, 3]


def test_a_prompt_of_which_nothing_is_stored_runs_as_a_plain_one_and_stores_nothing() -> None:
    with engine(TINY, enable_blending=True) as llm:
        before = llm.llm_engine.composer.num_encoded  # by other tests
        [output] = run(llm, tiny_prompt(in_place_chunks=ALL), PARAMS)
        assert output.blend is None and len(llm.llm_engine.chunk_store) == 0
        assert llm.llm_engine.composer.num_encoded == before
        [again] = run(llm, plain(tiny_prompt()), PARAMS)
        assert_same_logprobs(output, again)
        assert again.num_cached_tokens is not None and again.num_cached_tokens > 0, (
            "what it computed is a prefix like any other"
        )


@pytest.mark.parametrize("rule", ["question_attention", "value_deviation", "first_tokens", "none"])
@pytest.mark.parametrize("stored", [[2], [1, 2], [0, 3], [0]])
def test_what_is_stored_is_reused_and_the_rest_is_computed(rule: str, stored: list[int]) -> None:
    prompt = tiny_prompt(blend_selector=rule, in_place_chunks=ALL)
    with engine(TINY, enable_blending=True) as llm:
        llm.encode_chunks(prompt["prefix"], [prompt["chunks"][i] for i in stored])
        before = len(llm.llm_engine.chunk_store)
        [output] = run(llm, prompt, PARAMS)
        assert_counts_add_up(output)
        assert len(llm.llm_engine.chunk_store) == before
        known = [prompt["chunks"][i] for i in stored]
        where: list[int] = []
        sizes = [len(chunk) for chunk in prompt["chunks"]]
        for index, chunk in enumerate(prompt["chunks"]):
            start = len(prompt["prefix"]) + sum(sizes[:index])
            where += range(start, start + sizes[index]) if chunk in known else []
        context = len(prompt["prefix"]) + sum(sizes)
        computed = set(recomputed_positions(llm, len(prompt["suffix"])).tolist())
        holes = set(range(len(prompt["prefix"]), context)) - set(where)
        assert holes <= computed, "what is not stored is computed"
        free = len(where) - (sizes[0] if prompt["chunks"][0] in known else 0)  # the first chunk is exact where it is
        budget = 0 if rule == "none" else min(free, int(0.15 * context))
        assert len(computed) == len(holes) + budget


@pytest.mark.parametrize("stored", [[2], [0, 3]])
def test_ratio_1_is_full_prefill(stored: list[int]) -> None:
    prompt = tiny_prompt(blend_selector="value_deviation", blend_recompute_ratio=1.0, in_place_chunks=ALL)
    with engine(TINY, enable_blending=True) as llm:
        llm.encode_chunks(prompt["prefix"], [prompt["chunks"][i] for i in stored])
        [output] = run(llm, prompt, PARAMS)
        assert output.blend is not None
        assert_logprobs_match(output, hf_model(TINY))


def test_without_a_prefix() -> None:
    prompt = tiny_prompt(prefix=[], blend_selector="full", in_place_chunks=[0, 1])
    with engine(TINY, enable_blending=True) as llm:
        [output] = run(llm, prompt, PARAMS)
        assert len(llm.llm_engine.chunk_store) == 2, "chunks 2 and 3"
        assert_logprobs_match(output, hf_model(TINY))
        llm.llm_engine.chunk_store.clear()
        [output] = run(llm, tiny_prompt(prefix=[], in_place_chunks=ALL), PARAMS)
        assert output.blend is None
        assert_logprobs_match(output, hf_model(TINY))


def test_chunks_in_place_do_not_wait_for_their_encoding_by_another_prompt() -> None:
    prompt = tiny_prompt(blend_selector="full")
    with engine(TINY, enable_blending=True) as llm:
        first, second = run(llm, [prompt, prompt | {"in_place_chunks": ALL}], PARAMS)
        assert first.blend is not None and second.blend is None
        assert_same_logprobs(first, second)


def test_chunks_are_looked_for_below_the_memory(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"enable_blending": True, "chunk_store_path": str(tmp_path)}
    prompt = tiny_prompt(blend_selector="full", in_place_chunks=ALL)
    first = new_llm(TINY, **arguments)
    first.encode_chunks(prompt["prefix"], [prompt["chunks"][2]])
    close_store(first)
    second = new_llm(TINY, **arguments)
    [output] = run(second, prompt, PARAMS)
    assert_counts_add_up(output)
    assert output.blend is not None and output.blend.num_exact_tokens == len(prompt["prefix"])
    assert second.llm_engine.composer.num_encoded == 0
    [other] = run(second, {**prompt, "chunks": prompt["chunks"][:2], "in_place_chunks": [0, 1]}, PARAMS)
    assert other.blend is None and second.llm_engine.composer.num_encoded == 0
    for each in (output, other):
        assert_logprobs_match(each, hf_model(TINY))
    close_store(second)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("01", "in_place_chunks must be a list of chunk numbers, not str"),
        ([4], "in_place_chunks[0] is 4: use the positions of the prompt's 4 chunks"),
        ([1, 1], "in_place_chunks[1] is 1: use the positions of the prompt's 4 chunks, from 0, each at most once"),
        ([0.5], "in_place_chunks[0] is 0.5: give the number of a chunk"),
    ],
)
def test_bad_numbers(value: Any, message: str) -> None:
    with engine(TINY, enable_blending=True) as llm, pytest.raises((TypeError, ValueError), match=re.escape(message)):
        run(llm, tiny_prompt(in_place_chunks=value), PARAMS)
