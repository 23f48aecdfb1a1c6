"""Mode "exact" is standard generation, and so is a blend that computes everything; alone and in a batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chunks.llms import TINY, chunked_llm, random_compositions, random_ids
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import engine, greedy, run
from vllm_blend import ChunkedLLM, RequestOutput
from vllm_blend.chunks.composition import ChunkComposition

PARAMS = greedy(6, logprobs=1, ignore_eos=True)
COUNT = 50


def expected_outputs(compositions: list[ChunkComposition]) -> list[RequestOutput]:
    """Return the answers of an engine that reuses nothing, one prompt at a time."""
    with engine(TINY, enable_prefix_caching=False) as llm:
        return [run(llm, {"prompt_token_ids": made.token_ids}, PARAMS)[0] for made in compositions]


@pytest.mark.parametrize("options", [{"mode": "exact"}, {"recompute_ratio": 1.0}], ids=["exact", "ratio-1"])
@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batch"])
def test_random_compositions_equal_standard_generation(options: dict[str, Any], batched: bool) -> None:
    with chunked_llm() as chunked:
        compositions = random_compositions(chunked, COUNT, **options)
        if batched:
            outputs = chunked.batch_generate_from_chunks(compositions, PARAMS)
        else:
            outputs = [chunked.batch_generate_from_chunks([made], PARAMS)[0] for made in compositions]
    assert len(outputs) == COUNT
    blended = 0
    for made, output, expected in zip(compositions, outputs, expected_outputs(compositions), strict=True):
        assert output.prompt_token_ids == made.token_ids
        assert_same_logprobs(output, expected)
        blended += output.blend is not None
    assert (blended > COUNT // 2) == ("recompute_ratio" in options)


@pytest.mark.parametrize(
    "options", [{"mode": "reuse"}, {"retain": False}, {"selector": "first_tokens"}], ids=["reuse", "blend", "retained"]
)
def test_a_batch_equals_the_same_alone(options: dict[str, Any]) -> None:
    """They are equal even if a batch shares the pages of contexts that several of its requests have, as it does if the
    rule does not look at the question."""
    with chunked_llm() as chunked:
        compositions = random_compositions(chunked, 24, **options)
        together = chunked.batch_generate_from_chunks(compositions, PARAMS)
        chunked.llm.reset_prefix_cache()
        for made, output in zip(compositions, together, strict=True):
            [alone] = chunked.batch_generate_from_chunks([made], PARAMS)
            assert_same_logprobs(output, alone)


def test_exact_reuses_exact_prefixes() -> None:
    with chunked_llm() as chunked:
        chunks = [chunked.register_chunk(random_ids(20, seed)).id for seed in range(2)]
        first, second = (
            chunked.generate_from_chunks(None, chunks, query=random_ids(5, seed), sampling_params=PARAMS, mode="exact")
            for seed in (10, 11)
        )
        assert first.num_cached_tokens == 0 and second.num_cached_tokens is not None
        assert second.num_cached_tokens >= 32 and second.blend is None


def test_positions_belong_to_the_composition() -> None:
    """A chunk at two places of one composition, and at others of the next, while its stored KV stays what it is."""
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk(random_ids(9, 1))
        other = chunked.register_chunk(random_ids(4, 2))
        stored = chunked.llm_engine.chunk_store.get(chunk.id)
        assert stored is not None
        before = stored.copy()
        compositions = [
            chunked.compose(None, ids, query=random_ids(3, 5), recompute_ratio=1.0)
            for ids in ([chunk.id, chunk.id], [other.id, chunk.id, other.id], [other.id, other.id, chunk.id])
        ]
        outputs = chunked.batch_generate_from_chunks(compositions, PARAMS)
        for output, expected in zip(outputs, expected_outputs(compositions), strict=True):
            assert_same_logprobs(output, expected)
        assert (stored.k == before.k).all() and (stored.v == before.v).all()


def test_ChunkedLLM_wants_blending() -> None:
    with pytest.raises(ValueError, match="enable_blending=False"):
        ChunkedLLM(TINY, enable_blending=False)
    with pytest.raises(ValueError, match="blend_encoding_context='ordinal' is for chunks that come with a prompt"):
        ChunkedLLM(TINY, blend_encoding_context="ordinal")


def test_a_chunk_is_exact_after_its_own_system_prompt_not_after_one_as_long() -> None:
    with chunked_llm() as chunked:
        own, other = (chunked.register_chunk(random_ids(8, seed), "system_prompt") for seed in (1, 2))
        chunk = chunked.register_chunk(random_ids(9, 3), after=own)
        for system, exact in ((own, 17), (other, 8)):
            output = chunked.generate_from_chunks(system, [chunk], query=[5, 6], sampling_params=PARAMS, mode="reuse")
            assert output.blend is not None and output.blend.num_exact_tokens == exact
            assert output.blend.num_reused_tokens == 17 - exact


def test_an_output_shows_the_text_of_a_composition() -> None:
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk("some text ")
        for mode in ("blend", "exact"):
            output = chunked.generate_from_chunks(None, [chunk], query="and a question", mode=mode)
            assert output.prompt == chunked.get_tokenizer().decode(output.prompt_token_ids)
            assert output.prompt.endswith("some text and a question")
