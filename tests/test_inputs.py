"""A prompt whose chunks are put into another order is the prompt that was given in that order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine.engines import TINY_VOCABULARY
from vllm_blend.inputs import reorder_chunks
from vllm_blend.prompt_parser import parse_prompt

pytestmark = pytest.mark.cpu_only

CHUNKS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]
ORDER = [1, 3, 0, 2]


def parsed(**options: Any) -> Any:
    prompt: Any = {"prefix": [1, 2], "suffix": [20, 21], **options}
    return parse_prompt(prompt, None, TINY_VOCABULARY)


def test_all_that_a_prompt_says_of_its_chunks_moves_with_them() -> None:
    after = [[30], [31], [32], [33]]
    given = parsed(
        chunks=CHUNKS,
        relevance=[[0.1, 0.2, 0.3, 0.4], [8, 7, 6, 5]],
        chunk_ranking=[3, 0, 1, 2],
        in_place_chunks=[1, 2],
        continues=[None, None, 0, 1],
        encode_after=after,
    )
    assert reorder_chunks(given, ORDER) == parsed(
        chunks=[CHUNKS[index] for index in ORDER],
        relevance=[[0.2, 0.4, 0.1, 0.3], [7, 5, 8, 6]],
        chunk_ranking=[1, 2, 0, 3],
        in_place_chunks=[0, 3],
        continues=[None, 0, None, 2],
        encode_after=[after[index] for index in ORDER],
    )
    assert reorder_chunks(given, range(4)) == given
    assert reorder_chunks(replace(given, text="as it was"), ORDER).text is None
    bare = parsed(chunks=CHUNKS)
    assert reorder_chunks(bare, ORDER) == parsed(chunks=[CHUNKS[index] for index in ORDER])
