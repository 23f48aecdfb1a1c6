"""What predictors see is true: bounds bound, digests rotate; and each scores by it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend import ops
from vllm_blend.core.pages import MISSING
from vllm_blend.features.offload.digests import DIGEST_TOKENS, KeyDigests
from vllm_blend.features.offload.predictors import (
    PREDICTORS,
    PromotionEvidence,
    PromotionPredictor,
    make_predictor,
    register_predictor,
)
from vllm_blend.features.offload.promotion import ChunkScorer, StepQueries
from vllm_blend.features.offload.residency import Residency
from vllm_blend.ops.paged_kv import PagedKV

HEADS, KV_HEADS, DIM, SIZE, SCALE = 4, 2, 16, 4, 0.25


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([DIM, 8]), st.sampled_from([0.01, 1.0, 5.0]))
def test_no_key_scores_above_its_blocks_bound(seed: int, rotary_dim: int, spread: float) -> None:
    keys = _random(2, 3, 1, KV_HEADS, DIM, seed=seed) + spread * _random(2, 3, SIZE, KV_HEADS, DIM, seed=seed + 1)
    queries = _random(2, 5, HEADS, DIM, seed=seed + 2)
    digests = KeyDigests.from_keys(keys, torch.arange(3), rotary_dim)
    bounds = digests.scores(queries, SCALE)
    scores = torch.einsum("lrhd,lbshd->lrhbs", queries, keys.repeat_interleave(HEADS // KV_HEADS, 3)) * SCALE
    assert (scores.amax(-1) <= bounds + 1e-4).all()


@pytest.mark.parametrize("rotary_dim", [DIM, 8])
@pytest.mark.parametrize("shift", [1, 37, 500])
def test_a_digest_rotates_exactly_with_its_block(rotary_dim: int, shift: int) -> None:
    """The digest of a block placed `shift` tokens further on is the digest, turned by that angle."""
    keys, owner = _random(1, 2, SIZE, KV_HEADS, DIM), torch.arange(2)
    angles = torch.outer(torch.arange(1000.0), 10000 ** (-torch.arange(rotary_dim // 2) / (rotary_dim / 2)))

    def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, KV_HEADS, DIM)
        return ops.rotary_embedding(flat, angles.cos()[positions], angles.sin()[positions]).view(x.shape)

    first = torch.arange(2 * SIZE)
    here = KeyDigests.from_keys(rotated(keys, first), owner, rotary_dim)
    there = KeyDigests.from_keys(rotated(keys, first + shift), owner, rotary_dim)
    torch.testing.assert_close(rotated(here.centre, torch.tensor([shift, shift])), there.centre, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(here.radius, there.radius, atol=1e-5, rtol=1e-4)


def test_expected_mass_is_shared_among_chunks_and_follows_the_query() -> None:
    keys = torch.zeros(1, 4, SIZE, KV_HEADS, DIM)
    keys[0, 2, :, :, 3] = 4.0
    queries = torch.zeros(1, 2, HEADS, DIM)
    queries[0, 1, :, 3] = 4.0
    mass = KeyDigests.from_keys(keys, torch.tensor([0, 0, 1, 2]), DIM).expected_mass(queries, SCALE, 4)
    torch.testing.assert_close(mass[0], torch.tensor([0.5, 0.25, 0.25, 0.0]))
    torch.testing.assert_close(mass.sum(1), torch.ones(2))
    assert mass[1].argmax() == 1


def test_keys_of_no_chunk_take_their_share_too() -> None:
    keys = torch.zeros(1, 4, SIZE, KV_HEADS, DIM)
    digests = KeyDigests.from_keys(keys, torch.tensor([2, 0, 1, 2]), DIM)
    mass = digests.expected_mass(torch.ones(1, 1, HEADS, DIM), SCALE, 2)
    torch.testing.assert_close(mass, torch.tensor([[0.25, 0.25]]))


def test_a_block_has_digests_of_a_few_keys_each() -> None:
    keys = _random(1, 2, 4 * DIGEST_TOKENS, KV_HEADS, DIM)
    digests = KeyDigests.from_keys(keys, torch.tensor([1, 0]), DIM)
    assert digests.owner.tolist() == [1] * 4 + [0] * 4
    torch.testing.assert_close(digests.centre[0, 5], keys[0, 1, DIGEST_TOKENS : 2 * DIGEST_TOKENS].mean(0))
    assert KeyDigests.from_keys(keys[:, :, : DIGEST_TOKENS + 1], torch.tensor([1, 0]), DIM).owner.tolist() == [1, 0]


class _World:
    """One request of 5 blocks, 18 keys, in shuffled pages; chunk 0 is block 1, chunk 1 blocks 2 and 3."""

    def __init__(self) -> None:
        self.caches = [PagedKV(_random(9, SIZE, KV_HEADS, DIM, seed=s), torch.zeros(0)) for s in (1, 2)]
        self.residency = Residency.from_bounds([3, 1, 7, 2, 5], [(4, 8), (8, 16)], [1, 0], SIZE)
        self.queries = _random(2, 2, HEADS, DIM, seed=3)

    def scorer(self, predictor: PromotionPredictor) -> ChunkScorer:
        return ChunkScorer(predictor, (0, 1), self.caches, SCALE, DIM)

    def evict(self, index: int) -> None:
        chunk = self.residency.chunks[index]
        for logical in chunk.blocks:
            for cache in self.caches:
                cache.key[self.residency.table[logical]] = float("nan")
            self.residency.table[logical] = MISSING
        chunk.resident = False


class _Spy(PromotionPredictor):
    uses_queries = True

    def score(self, evidence: PromotionEvidence) -> torch.Tensor:
        self.evidence = evidence
        return torch.zeros(2)


def test_digests_outlive_the_blocks_that_they_are_of() -> None:
    world, spy = _World(), _Spy()
    scorer = world.scorer(spy)
    scorer.scores(world.residency, StepQueries(world.queries, 17))
    before = spy.evidence.expected_mass
    world.evict(1)
    scorer.scores(world.residency, StepQueries(world.queries, 17))
    torch.testing.assert_close(spy.evidence.expected_mass, before)
    assert spy.evidence.previous is not None
    scorer.forget(world.residency)
    assert scorer._memory == {} and scorer._latest == {}


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_every_predictor_scores_every_chunk(name: str) -> None:
    world = _World()
    scorer = world.scorer(make_predictor(name))
    first = scorer.scores(world.residency, StepQueries(world.queries, 17))
    world.evict(0)
    second = scorer.scores(world.residency, StepQueries(world.queries, 17))
    for scores in (first, second):
        assert scores is not None and len(scores) == 2 and all(0 <= s <= 1 for s in scores)
    assert scorer.scores(world.residency, None) == second  # nothing new was asked


def test_the_last_row_counts() -> None:
    mass = torch.tensor([[0.7, 0.1, 0.2], [0.2, 0.3, 0.5]])
    evidence = PromotionEvidence(torch.arange(3), torch.ones(3, dtype=torch.bool), None, mass)
    assert make_predictor("retrieval_rank").score(evidence).tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    torch.testing.assert_close(make_predictor("query_digest").score(evidence), mass[1])


def test_scores_are_an_average_over_steps() -> None:
    resident, now = torch.ones(2, dtype=torch.bool), torch.tensor([[1.0, 0.0]])
    evidence = PromotionEvidence(torch.arange(2), resident, torch.tensor([0.5, 0.25]), now)
    assert make_predictor("query_digest").score(evidence).tolist() == [0.75, 0.125]


def test_a_predictor_of_ones_own() -> None:
    class Own(PromotionPredictor):
        name = "own"

        def score(self, evidence: PromotionEvidence) -> torch.Tensor:
            return torch.zeros(3)

    register_predictor(Own)
    try:
        world = _World()
        with pytest.raises(ValueError, match=r"Own\.score\(\) must return one score for each of the 2 chunks"):
            world.scorer(make_predictor("own")).scores(world.residency, None)
        with pytest.raises(ValueError, match="registered already"):
            register_predictor(type("Other", (Own,), {}))
    finally:
        del PREDICTORS["own"]
    with pytest.raises(ValueError, match=r"offload_predictor='own' is unknown"):
        make_predictor("own")
    with pytest.raises(ValueError, match="class attribute `name`"):
        register_predictor(type("Nameless", (PromotionPredictor,), {"score": Own.score}))


def test_wrong_drafts_have_no_say() -> None:
    queries = StepQueries(torch.arange(5.0)[None, :, None, None], 24)  # positions 20 .. 24
    assert queries.up_to(24) is queries and queries.up_to(30) is queries
    assert queries.up_to(22).position == 22 and queries.up_to(22).queries.flatten().tolist() == [0, 1, 2]
    assert queries.up_to(3).position == 20 and queries.up_to(3).queries.flatten().tolist() == [0]
