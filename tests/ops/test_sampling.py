from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.layers.sampling import DEVICES, draw, random_logits
from vllm_blend.sampling_params import SamplingParams

VOCAB, GRID = 128, 4096


def shares(logits: torch.Tensor, params: SamplingParams, device: str = "cpu") -> torch.Tensor:
    """Return how often each token is drawn for logits [vocabulary] from an even grid of uniform numbers: [vocabulary].

    Inverting the cumulative distribution at an even grid meets every probability to within one point of the grid.
    """
    uniforms = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    tokens = draw(logits.to(device).expand(GRID, -1), [params] * GRID, uniforms).cpu()
    return torch.bincount(tokens, minlength=logits.shape[0]).double() / GRID


def transformers_probabilities(logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    warpers = LogitsProcessorList()
    if "temperature" in settings:
        warpers.append(TemperatureLogitsWarper(settings["temperature"]))
    if "min_p" in settings:
        warpers.append(MinPLogitsWarper(settings["min_p"]))
    if "top_k" in settings:
        warpers.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        warpers.append(TopPLogitsWarper(settings["top_p"]))
    return warpers(torch.LongTensor([[0]]), logits.double().unsqueeze(0).clone()).softmax(-1)[0]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCAB},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"temperature": 1.7, "min_p": 0.05, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.7, "min_p": 0.3, "top_p": 0.6},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_distribution_is_transformers(settings: dict[str, Any], seed: int, device: str) -> None:
    logits = random_logits(1, VOCAB, seed, scale=2.0)[0]
    expected = transformers_probabilities(logits, settings)
    actual = shares(logits, SamplingParams(**settings), device)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1.01 / GRID)
    assert actual[expected == 0].sum() == 0


def test_filters_of_one_row_do_not_reach_another() -> None:
    logits = random_logits(len(SETTINGS), VOCAB)
    params = [SamplingParams(**settings) for settings in SETTINGS]
    for seed in range(20):
        uniforms = torch.rand(len(params), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        together = draw(logits, params, uniforms)
        alone = [draw(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1]) for i in range(len(params))]
        assert together.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}], ids=str)
def test_equal_logits_stay_together(settings: dict[str, Any]) -> None:
    """Equal tokens survive together, however a sort orders them."""
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0, -1.0])
    torch.testing.assert_close(
        shares(logits, SamplingParams(**settings))[1:4], torch.full((3,), 1 / 3).double(), rtol=0, atol=2 / GRID
    )


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_extreme_uniforms_draw_possible_tokens(uniform: float) -> None:
    """Tokens of probability zero stand at both ends of the vocabulary, where rounding would land."""
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 3:6] = torch.tensor([0.1, 0.2, 0.7]).log()
    for settings in ({}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 1.3}):
        token = draw(logits, [SamplingParams(**settings)], torch.tensor([uniform], dtype=torch.float64))
        assert token.item() in ({3, 4} if uniform == 0.0 else {5})


def test_tiny_temperature_is_the_best_token() -> None:
    logits = torch.tensor([[1e4, 3e4, 2.9e4]])
    for uniform in (0.0, 0.5, 0.999):
        token = draw(logits, [SamplingParams(temperature=2e-5)], torch.tensor([uniform], dtype=torch.float64))
        assert token.item() == 1


def test_input_logits_are_left_alone() -> None:
    logits = random_logits(2, VOCAB)
    before = logits.clone()
    draw(logits, [SamplingParams(top_p=0.5, temperature=0.5)] * 2, torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert torch.equal(logits, before)
