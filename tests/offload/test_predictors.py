"""What predictors see is true: bounds bound, digests rotate, mass is that of attention; and each scores by it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend import ops
from vllm_blend.attention.metadata import LayerCache
from vllm_blend.offload.block_pool import HostBlockPool
from vllm_blend.offload.digests import DIGEST_TOKENS, KeyDigests
from vllm_blend.offload.predictors import PREDICTORS, Evidence, PromotionPredictor, make_predictor, register_predictor
from vllm_blend.offload.predictors.query_digest import smoothed
from vllm_blend.offload.promotion import Asked, ChunkScorer
from vllm_blend.offload.residency import MISSING, Residency

HEADS, KV_HEADS, DIM, SIZE, SCALE = 4, 2, 16, 4, 0.25


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([DIM, 8]), st.sampled_from([0.01, 1.0, 5.0]))
def test_no_key_scores_above_its_blocks_bound(seed, rotary_dim, spread):
    keys = _random(2, 3, 1, KV_HEADS, DIM, seed=seed) + spread * _random(2, 3, SIZE, KV_HEADS, DIM, seed=seed + 1)
    queries = _random(2, 5, HEADS, DIM, seed=seed + 2)
    digests = KeyDigests.of(keys, torch.arange(3), rotary_dim)
    bounds = digests.scores(queries, SCALE)
    scores = torch.einsum("lrhd,lbshd->lrhbs", queries, keys.repeat_interleave(HEADS // KV_HEADS, 3)) * SCALE
    assert (scores.amax(-1) <= bounds + 1e-4).all()


@pytest.mark.parametrize("rotary_dim", [DIM, 8])
@pytest.mark.parametrize("shift", [1, 37, 500])
def test_a_digest_rotates_exactly_with_its_block(rotary_dim, shift):
    """The digest of a block placed `shift` tokens further on is the digest, turned by that angle."""
    keys, owner = _random(1, 2, SIZE, KV_HEADS, DIM), torch.arange(2)
    angles = torch.outer(torch.arange(1000.0), 10000 ** (-torch.arange(rotary_dim // 2) / (rotary_dim / 2)))

    def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, KV_HEADS, DIM)
        return ops.rotary_embedding(flat, angles.cos()[positions], angles.sin()[positions]).view(x.shape)

    first = torch.arange(2 * SIZE)
    here = KeyDigests.of(rotated(keys, first), owner, rotary_dim)
    there = KeyDigests.of(rotated(keys, first + shift), owner, rotary_dim)
    torch.testing.assert_close(rotated(here.centre, torch.tensor([shift, shift])), there.centre, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(here.radius, there.radius, atol=1e-5, rtol=1e-4)


def test_expected_mass_is_shared_among_chunks_and_follows_the_query():
    keys = torch.zeros(1, 4, SIZE, KV_HEADS, DIM)
    keys[0, 2, :, :, 3] = 4.0
    queries = torch.zeros(1, 2, HEADS, DIM)
    queries[0, 1, :, 3] = 4.0
    mass = KeyDigests.of(keys, torch.tensor([0, 0, 1, 2]), DIM).expected_mass(queries, SCALE, 4)
    torch.testing.assert_close(mass[0], torch.tensor([0.5, 0.25, 0.25, 0.0]))
    torch.testing.assert_close(mass.sum(1), torch.ones(2))
    assert mass[1].argmax() == 1


def test_keys_of_no_chunk_take_their_share_too():
    keys = torch.zeros(1, 4, SIZE, KV_HEADS, DIM)
    mass = KeyDigests.of(keys, torch.tensor([2, 0, 1, 2]), DIM).expected_mass(torch.ones(1, 1, HEADS, DIM), SCALE, 2)
    torch.testing.assert_close(mass, torch.tensor([[0.25, 0.25]]))


def test_a_block_has_digests_of_a_few_keys_each():
    keys = _random(1, 2, 4 * DIGEST_TOKENS, KV_HEADS, DIM)
    digests = KeyDigests.of(keys, torch.tensor([1, 0]), DIM)
    assert digests.owner.tolist() == [1] * 4 + [0] * 4
    torch.testing.assert_close(digests.centre[0, 5], keys[0, 1, DIGEST_TOKENS : 2 * DIGEST_TOKENS].mean(0))
    assert KeyDigests.of(keys[:, :, : DIGEST_TOKENS + 1], torch.tensor([1, 0]), DIM).owner.tolist() == [1, 0]


class _World:
    """One request of 5 blocks, 18 keys, in shuffled pages; chunk 0 is block 1, chunk 1 blocks 2 and 3."""

    def __init__(self) -> None:
        self.caches = [LayerCache(_random(9, SIZE, KV_HEADS, DIM, seed=s), torch.zeros(0)) for s in (1, 2)]
        self.host = HostBlockPool(6 * 2 * 2 * SIZE * KV_HEADS * DIM * 4, 2, SIZE, KV_HEADS, DIM, torch.float32)
        self.residency = Residency.of([3, 1, 7, 2, 5], [(4, 8), (8, 16)], [1, 0], SIZE)
        self.keys = [cache.key[self.residency.table].flatten(0, 1)[:18] for cache in self.caches]
        self.queries = _random(2, 2, HEADS, DIM, seed=3)

    def scorer(self, predictor: PromotionPredictor, host: bool) -> ChunkScorer:
        return ChunkScorer(predictor, (0, 1), self.caches, SCALE, DIM, self.host if host else None)

    def evict(self, index: int) -> None:
        chunk = self.residency.chunks[index]
        host = self.host.allocate(len(chunk.blocks))
        assert host is not None
        for logical, block in zip(chunk.blocks, host, strict=True):
            for layer, cache in enumerate(self.caches):
                self.host.data[block, 0, layer] = cache.key[self.residency.table[logical]]
                cache.key[self.residency.table[logical]] = float("nan")
            self.residency.table[logical] = MISSING
        chunk.resident, chunk.host = False, host

    def mass(self, seen: torch.Tensor) -> torch.Tensor:
        """[rows, keys] by the definition: row 1 is at position 17, row 0 before it."""
        total = torch.zeros(2, 18)
        for keys, queries in zip(self.keys, self.queries, strict=True):
            scores = torch.einsum("rhd,nhd->rhn", queries, keys.repeat_interleave(HEADS // KV_HEADS, 1)) * SCALE
            scores[:, :, ~seen] = float("-inf")
            scores[0, :, 17] = float("-inf")
            total += scores.softmax(-1).mean(1)
        return total / 2


class _Spy(PromotionPredictor):
    def __init__(self, looks_at):
        self.looks_at = looks_at

    def score(self, evidence):
        self.evidence = evidence
        return torch.zeros(2)


@pytest.mark.parametrize("away", [[], [0], [1], [0, 1]])
@pytest.mark.parametrize("attended", [True, False])
def test_received_mass_is_that_of_attention(away, attended):
    world, spy = _World(), _Spy(make_predictor("attention_mass").looks_at)
    for index in away:
        world.evict(index)
    world.scorer(spy, host=attended).scores(world.residency, Asked(world.queries, 17))
    seen = torch.ones(18, dtype=torch.bool)
    for index in [] if attended else away:
        seen[slice(*[(4, 8), (8, 16)][index])] = False
    mass = world.mass(seen)
    expected = torch.stack([mass[:, 4:8].sum(1), mass[:, 8:16].sum(1)], 1)
    if not attended:
        expected[:, away] = float("nan")
    torch.testing.assert_close(spy.evidence.received_mass, expected, equal_nan=True)
    assert spy.evidence.resident.tolist() == [i not in away for i in range(2)]


def test_digests_outlive_the_blocks_that_they_are_of():
    world, spy = _World(), _Spy(make_predictor("query_digest").looks_at)
    scorer = world.scorer(spy, host=False)
    scorer.scores(world.residency, Asked(world.queries, 17))
    before = spy.evidence.expected_mass
    world.evict(1)
    scorer.scores(world.residency, Asked(world.queries, 17))
    torch.testing.assert_close(spy.evidence.expected_mass, before)
    assert spy.evidence.previous is not None
    scorer.forget(world.residency)
    assert scorer._memory == {} and scorer._latest == {}


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_every_predictor_scores_every_chunk(name):
    world = _World()
    scorer = world.scorer(make_predictor(name), host=False)
    first = scorer.scores(world.residency, Asked(world.queries, 17))
    world.evict(0)
    second = scorer.scores(world.residency, Asked(world.queries, 17))
    for scores in (first, second):
        assert scores is not None and len(scores) == 2 and all(0 <= s <= 1 for s in scores)
    assert scorer.scores(world.residency, None) == second  # nothing new was asked


def test_the_last_row_counts_or_the_most_of_all():
    mass = torch.tensor([[0.7, 0.1, 0.2], [0.2, 0.3, 0.5]])
    evidence = Evidence(torch.arange(3), torch.ones(3, dtype=torch.bool), None, mass, mass)
    assert make_predictor("retrieval_rank").score(evidence).tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    torch.testing.assert_close(make_predictor("query_digest").score(evidence), mass[1])
    torch.testing.assert_close(make_predictor("attention_mass").score(evidence), mass[1])
    torch.testing.assert_close(make_predictor("draft_union").score(evidence), torch.tensor([0.7, 0.3, 0.5]))


def test_an_average_keeps_what_is_out_of_sight():
    now = torch.tensor([1.0, float("nan")])
    assert smoothed(None, now, 0.5).tolist() == [1.0, 0.0]
    assert smoothed(torch.tensor([0.5, 0.25]), now, 0.5).tolist() == [0.75, 0.25]


def test_a_predictor_of_ones_own():
    class Own(PromotionPredictor):
        name = "own"

        def score(self, evidence):
            return torch.zeros(3)

    register_predictor(Own)
    try:
        world = _World()
        with pytest.raises(ValueError, match=r"Own\.score\(\) must return one score for each of the 2 chunks"):
            world.scorer(make_predictor("own"), host=False).scores(world.residency, None)
        with pytest.raises(ValueError, match="registered already"):
            register_predictor(type("Other", (Own,), {}))
    finally:
        del PREDICTORS["own"]
    with pytest.raises(ValueError, match=r"offload_predictor='own' is unknown"):
        make_predictor("own")
    with pytest.raises(ValueError, match="class attribute `name`"):
        register_predictor(type("Nameless", (PromotionPredictor,), {"score": Own.score}))


def test_the_chunk_that_drafts_are_copied_from_is_wanted():
    mass = torch.tensor([[0.3, 0.1, 0.0]])
    union = make_predictor("draft_union")
    for source, wanted in ((2, [0.3, 0.1, 0.5]), (None, [0.3, 0.1, 0.0])):
        evidence = Evidence(torch.arange(3), torch.ones(3, dtype=torch.bool), None, mass, None, source)
        torch.testing.assert_close(union.score(evidence), torch.tensor(wanted))


def test_wrong_drafts_have_no_say():
    asked = Asked(torch.arange(5.0)[None, :, None, None], 24)  # positions 20 .. 24
    assert asked.until(24) is asked and asked.until(30) is asked
    assert asked.until(22).position == 22 and asked.until(22).queries.flatten().tolist() == [0, 1, 2]
    assert asked.until(3).position == 20 and asked.until(3).queries.flatten().tolist() == [0]
