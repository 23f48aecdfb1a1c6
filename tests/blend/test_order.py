"""The order "free": chunks stand by their relevance, pages stay whole, and scores that cannot be are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.blend.prompts import plain, tiny_prompt
from tests.engine.compare import assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import TINY_VOCABULARY, engine, greedy, hf_model, run, tiny_model
from vllm_blend.blend.order import fuse, order_by_relevance, reorder_chunks
from vllm_blend.prompt_parser import parse_prompt

TINY = tiny_model("llama")
PARAMS = greedy(6, logprobs=2, ignore_eos=True)
CHUNKS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


def parsed(chunks: Sequence[list[int]] = CHUNKS, **options: Any) -> Any:
    prompt: Any = {"prefix": [1, 2], "chunks": chunks, "suffix": [20, 21], **options}
    return parse_prompt(prompt, None, TINY_VOCABULARY)


@pytest.mark.cpu_only
def test_all_that_a_prompt_says_of_its_chunks_moves_with_them() -> None:
    after, order = [[30], [31], [32], [33]], [1, 3, 0, 2]
    given = parsed(
        order="free",
        relevance=[[0.1, 0.2, 0.3, 0.4], [8, 7, 6, 5]],
        chunk_ranking=[3, 0, 1, 2],
        in_place_chunks=[1, 2],
        continues=[None, None, 0, 1],
        encode_after=after,
    )
    assert reorder_chunks(given, order) == parsed(
        [CHUNKS[index] for index in order],
        order="free",
        relevance=[[0.2, 0.4, 0.1, 0.3], [7, 5, 8, 6]],
        chunk_ranking=[1, 2, 0, 3],
        in_place_chunks=[0, 3],
        continues=[None, 0, None, 2],
        encode_after=[after[index] for index in order],
    )
    assert reorder_chunks(given, range(4)) == given
    assert reorder_chunks(replace(given, text="as it was"), order).text is None
    assert reorder_chunks(parsed(), order) == parsed([CHUNKS[index] for index in order])


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("relevance", "continues", "expected"),
    [
        ([0, 2, 3, 1], None, [2, 1, 3, 0]),
        ([None, None, -3, None], None, [2, 0, 1, 3]),
        ([1, 1, 1, 1], None, [0, 1, 2, 3]),
        ([0, 1, 0, 2], [None, None, 0, 1], [1, 3, 0, 2]),  # a page is as relevant as its best chunk
        ([0, 3, 1, 0], [None, None, None, 0], [1, 2, 0, 3]),
        ([[9, 8, 7, 6], [0, 0, 2, 1]], None, [0, 2, 1, 3]),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], None, [3, 2, 1, 0]),
        (torch.tensor([[0, 0, 1.5, 0]]), None, [2, 0, 1, 3]),
    ],
)
def test_the_most_relevant_pages_stand_first(relevance: Any, continues: Any, expected: list[int]) -> None:
    found = order_by_relevance(parsed(order="free", relevance=relevance, continues=continues))
    assert [CHUNKS.index(found.token_ids[slice(*bounds)]) for bounds in found.chunk_bounds] == expected
    assert found.token_ids[:2] == [1, 2] and found.token_ids[-2:] == [20, 21]


@pytest.mark.cpu_only
def test_ranks_are_fused_and_equal_scores_have_equal_ranks() -> None:
    assert fuse([[5.0, 5.0, 0.0]]) == [1 / 61, 1 / 61, 1 / 63]
    assert fuse([[1.0, 2.0], [7.0, 3.0]]) == [1 / 62 + 1 / 61, 1 / 61 + 1 / 62]


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("relevance", "message"),
    [
        ([0.1, 0.2], "relevance has 2 scores for 4 chunks: give one for each chunk"),
        ([], "relevance has 0 scores for 4 chunks"),
        ([1, 2, 3, "4"], r"relevance\[3\] is '4': give a score, a number"),
        ([None] * 4, "relevance has no score but None: leave it out"),
        ([1, 2, 3, True], r"relevance\[3\] is True: give a score, a number"),
        ([1, 2, 3, 10**400], r"relevance\[3\] is 10+: scores must be finite"),
        ([torch.tensor(1.0)] * 4, r"relevance\[0\] is tensor\(1.\): give a score, a number"),
        ({1, 2, 3, 4}, "relevance must be a list with a score for each chunk, not set"),
        ([1, 2, 3, float("nan")], r"relevance\[3\] is nan: scores must be finite"),
        ([[1, 2, 3, 4], [1, 2]], r"relevance\[1\] has 2 scores for 4 chunks"),
        ([[1, 2, 3, 4], 5, 6, 7], r"relevance\[0\] is \[1, 2, 3, 4\]: give a score"),
        ("0.1", "relevance must be a list with a score for each chunk, not str"),
        ({0: 1.0}, "relevance must be a list with a score for each chunk, not dict"),
        (0.5, "relevance must be a list with a score for each chunk, not float"),
        (None, "order is 'free', but relevance is not given: give a score for each chunk, or leave order out"),
    ],
)
def test_scores_that_cannot_be(relevance: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        parsed(order="free", relevance=relevance)


@pytest.mark.cpu_only
def test_scores_and_order_belong_together() -> None:
    with pytest.raises(ValueError, match="relevance is given, but only the order of the chunks goes by it: set order"):
        parsed(relevance=[0, 1, 2, 3])
    with pytest.raises(ValueError, match="order is 'best': use 'given', or 'free' if"):
        parsed(order="best", relevance=[0, 1, 2, 3])
    assert parsed(order="given", relevance=None) == parsed()


def test_the_prompt_is_the_one_that_is_given_in_that_order() -> None:
    """The first chunk is exact there. An engine that does not blend leaves the order as it is."""
    options: dict[str, Any] = {"order": "free", "relevance": [0, 2, 3, 1], "in_place_chunks": [1]}
    prompt = tiny_prompt(blend_recompute_ratio=0.2, **options)
    first = [prompt["chunks"][index] for index in (2, 1, 3, 0)]
    with engine(TINY, enable_blending=True) as llm:
        [output] = run(llm, prompt, PARAMS)
        [given] = run(llm, tiny_prompt(chunks=first, blend_recompute_ratio=0.2, in_place_chunks=[1]), PARAMS)
        assert output.prompt_token_ids == given.prompt_token_ids
        assert_same_logprobs(output, given)
        [full] = run(llm, prompt | {"blend_recompute_ratio": 1.0}, PARAMS)
        assert_logprobs_match(full, hf_model(TINY))
        [none] = run(llm, tiny_prompt(blend_selector="none", **options), PARAMS)
        assert none.blend is not None and none.blend.num_exact_tokens == 5 + 21
    with engine(TINY) as llm:
        [output] = run(llm, tiny_prompt(**options), PARAMS)
        assert output.prompt_token_ids == plain(tiny_prompt())["prompt_token_ids"]


def test_pages_are_exact_in_a_free_order() -> None:
    prompt = tiny_prompt(order="free", relevance=[0, 1, 0, 2], continues=[None, None, 0, 1], blend_selector="none")
    with engine(TINY, enable_blending=True, blend_encoding_context="page") as llm:
        _, output = (run(llm, prompt, PARAMS)[0] for _ in range(2))
        assert output.blend is not None and output.blend.num_exact_tokens == 5 + 3 + 12  # the first page, whole
