"""Equal tokens have equal scores whatever rounding makes of them: which of them goes depends on the position alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, TINY_VOCABULARY, engine, greedy, run, tiny_model
from tests.features.kv_compress.worlds import ALLOCATIONS
from vllm_blend.features.kv_compress import engine as engine_module
from vllm_blend.features.kv_compress.evictions import TOLERANCE, Evictions, schedule_evictions, tie_starts
from vllm_blend.features.kv_compress.metrics import METRICS, EvictionMetric, HeadView
from vllm_blend.features.kv_compress.metrics.keydiff import KeyDiff
from vllm_blend.features.kv_compress.metrics.knorm import KNorm

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


def kept_of(metric: EvictionMetric, keys: torch.Tensor) -> torch.Tensor:
    """Return the positions of the 12 of a head's 40 `keys` [40, head_dim] that the metric scores highest, ascending."""
    positions = torch.arange(40)[None]
    view = HeadView(0, 1, keys.shape[1] ** -0.5, keys[None], torch.zeros(1, *keys.shape), positions, positions >= 0)
    rank, positions, lengths = metric.score(view)[None], positions[None], torch.full((1, 1), 40)
    evictions = schedule_evictions(rank, positions, lengths, 28, 0, 40, 1, "head", metric.magnitude)
    return (~evictions.evicted[0, 0]).nonzero().flatten()


def test_keys_of_equal_norms_are_kept_from_the_end_whatever_rounding_makes_of_them() -> None:
    keys = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))[torch.arange(40) % 5]
    exact = kept_of(KNorm(), keys)
    assert len(exact) == 12 and (exact % 5).unique().numel() == 2
    assert all(torch.equal(kept_of(KNorm(), keys * noise(keys.shape, seed)), exact) for seed in range(20))


def test_cosines_around_0_are_rounded_as_those_around_1_are() -> None:
    """Keys at right angles to the mean: 20 of a direction, and 10 each of two opposite ones that tie."""
    directions = torch.eye(8)[[0, 1, 0, 1]] * torch.tensor([1.0, 1.0, 1.0, -1.0])[:, None]
    turned, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(2)))
    keys = (directions @ turned).repeat(10, 1)
    for seed in range(5):
        assert kept_of(KeyDiff(), keys * noise(keys.shape, seed)).tolist() == list(range(17, 40, 2))


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
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            few = torch.randint(TINY_VOCABULARY, (4,), generator=generator)
            drawn = [few[torch.randint(4, (length,), generator=generator)].tolist() for length in (46, 32, 23, 9, 36)]
            prompts = [{"prompt_token_ids": ids} for ids in drawn]
            together = run(llm, prompts, params)
            for prompt, output in zip(prompts, together, strict=True):
                assert_same_logprobs(output, run(llm, prompt, params)[0])
