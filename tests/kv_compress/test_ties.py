"""Equal tokens have equal scores whatever rounding makes of them: which of them goes depends on the position alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, run, tiny_model
from tests.kv_compress.worlds import ALLOCATIONS
from vllm_blend.kv_compress import engine as engine_module
from vllm_blend.kv_compress.chunks import ChunkCompression
from vllm_blend.kv_compress.evictions import Evictions, schedule_evictions
from vllm_blend.kv_compress.metrics import METRICS, KeyDiff, KNorm
from vllm_blend.kv_compress.ties import TOLERANCE, tie_starts
from vllm_blend.kv_store.chunk_kv import ChunkKV

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scores", "magnitude", "starts"),
    [
        ([1.0, 1 + TOLERANCE / 2, 1 + TOLERANCE, 1 + 4 * TOLERANCE], 0.0, [0, 0, 0, 3]),  # a run, its ends far apart
        ([-1 - TOLERANCE / 2, -1.0, 1.0], 0.0, [0, 0, 2]),
        ([1e-9, 1.5e-9, 2e-9], 0.0, [0, 1, 2]),
        ([1e-9, 1.5e-9, 2e-9], 1.0, [0, 0, 0]),
        ([NAN, NAN, -INF, -INF, 0.0, 0.0, 3e38, INF, INF], 0.0, [0, 0, 2, 2, 4, 4, 6, 7, 7]),
        ([2.0, 2 - TOLERANCE, 1.0], 0.0, [0, 0, 2]),  # descending
        ([], 0.0, []),
    ],
)
def test_a_tie_is_a_run_of_close_neighbours(scores: list[float], magnitude: float, starts: list[int]) -> None:
    assert tie_starts(torch.tensor([scores]), magnitude).tolist() == [starts]


def noise(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Rounding errors of a batch: up to four units in the last place."""
    generator = torch.Generator().manual_seed(seed)
    return 1 + torch.randint(-4, 5, tuple(shape), generator=generator) * 2.0**-23


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_rounding_does_not_choose_among_equal_tokens(allocation: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    norms = 1 + torch.arange(7) / 3
    metric = norms[torch.randint(7, (2, 2, 60), generator=generator)]
    positions = torch.stack([torch.randperm(60, generator=generator) for _ in range(4)]).view(2, 2, 60)
    lengths, limits = torch.full((2, 2), 60), (21, 2, 50, 4, allocation)
    expected = schedule_evictions(metric, positions, lengths, *limits)
    assert expected.evicted.any()
    for seed in range(20):
        rounded = schedule_evictions(metric * noise(metric.shape, seed), positions, lengths, *limits)
        assert torch.equal(rounded.evicted, expected.evicted)


def test_stored_chunks_keep_the_same_of_equal_tokens() -> None:
    keys = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(1))[torch.arange(40) % 5]
    compression = ChunkCompression(KNorm(), 0.3)

    def kept(rounding: torch.Tensor) -> torch.Tensor:
        positions = compression.compress(ChunkKV((keys * rounding)[None], torch.zeros(1, 40, 1, 8))).positions
        assert positions is not None
        return positions

    exact = kept(torch.ones(40, 1, 8))
    assert (exact.flatten() % 5).unique().numel() == 2 and (exact[:8, 0] < 40).all()
    assert all(torch.equal(kept(noise((40, 1, 8), seed)), exact) for seed in range(20))


def test_cosines_around_0_are_rounded_as_those_around_1_are() -> None:
    """Keys at right angles to the mean: 20 of a direction, and 10 each of two opposite ones that tie."""
    directions = torch.eye(8)[[0, 1, 0, 1]] * torch.tensor([1.0, 1.0, 1.0, -1.0])[:, None]
    turned, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))
    keys = (directions @ turned).repeat(10, 1)[:, None]
    compression = ChunkCompression(KeyDiff(), 0.3)
    for seed in range(5):
        kept = compression.compress(ChunkKV((keys * noise(keys.shape, seed))[None], torch.zeros(1, 40, 1, 8))).positions
        assert kept is not None and kept.flatten().tolist() == list(range(1, 24, 2))


@pytest.mark.parametrize("metric", ["keydiff", "knorm"])
def test_prompts_and_head_pages_are_compared_by_the_magnitude_of_the_metric(
    metric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, float]] = set()

    def noting(rank: torch.Tensor, *others: Any) -> Evictions:
        seen.add((rank.dim(), others[7]))
        return schedule_evictions(rank, *others)

    monkeypatch.setattr(engine_module, "schedule_evictions", noting)
    settings = {"enable_kvc": True, "kvc_metric": metric, "protected_window_size": 6, "num_sinks": 1, "kvc_interval": 4}
    with engine(tiny_model("qwen2"), **settings, max_cache_tokens=16, block_size=BLOCK_SIZE) as llm:
        run(llm, {"prompt_token_ids": list(range(40))}, greedy(12, ignore_eos=True))
    assert seen == {(dim, {"keydiff": 1.0, "knorm": 0.0}[metric]) for dim in (3, 4)}


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_answers_over_repeated_tokens_do_not_depend_on_the_batch(metric: str) -> None:
    """Tokens computed one by one or beside others: products of other shapes, which round otherwise."""
    settings = {"enable_kvc": True, "kvc_metric": metric, "protected_window_size": 6, "num_sinks": 1, "kvc_interval": 4}
    settings |= {"max_cache_tokens": 16, "block_size": BLOCK_SIZE, "enable_prefix_caching": False}
    params = greedy(36, logprobs=1, ignore_eos=True)
    with engine(tiny_model("qwen2"), **settings) as llm:
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            few = torch.randint(TINY_VOCABULARY, (4,), generator=generator)
            drawn = [few[torch.randint(4, (length,), generator=generator)].tolist() for length in (46, 32, 23, 9, 36)]
            prompts = [{"prompt_token_ids": ids} for ids in drawn]
            together = run(llm, prompts, params)
            for prompt, output in zip(prompts, together, strict=True):
                assert_same_logprobs(output, run(llm, prompt, params)[0])
