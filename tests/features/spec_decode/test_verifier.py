"""The drafts that are kept, and the distribution of the output with them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.layers.sampling import draw
from vllm_blend.features.spec_decode.config import MAX_DRAFT_TOKENS
from vllm_blend.features.spec_decode.verifier import num_kept
from vllm_blend.layers.logits_processing import process_logits
from vllm_blend.layers.sampler import Sampler
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.sampling_params import SamplingParams

VOCABULARY = 5
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4)) * 1.5  # row: the token before


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_kept_is_the_agreeing_prefix_and_one_more(drawn: list[int], data: st.DataObject) -> None:
    size = len(drawn) - 1
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    agreeing = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, drawn, strict=False))))
    assert num_kept(drafts, drawn) == agreeing + 1


def test_a_row_without_a_token_ends_it() -> None:
    assert num_kept([3, 4], [3, -1, 4]) == 2


def test_one_draw_per_draft_and_one_more() -> None:
    with pytest.raises(ValueError, match="one each and one more"):
        num_kept([1, 2], [1, 2])


def test_all_draws_of_the_longest_draft_are_taken_back() -> None:
    state = SamplingState(SamplingParams(seed=1), [0], [])
    count = 1 + MAX_DRAFT_TOKENS
    drawn = [state.next_uniform() for _ in range(count)]
    state.take_back(count)
    assert [state.next_uniform() for _ in range(count)] == drawn


def decode(sampler: Sampler, params: SamplingParams, drafts: list[int]) -> tuple[int, int]:
    """Two tokens after token 0 of a model that looks at the last token alone; the first step verifies `drafts`."""
    [pair] = decode_batch(sampler, params, drafts, 1)
    return pair


def decode_batch(sampler: Sampler, params: SamplingParams, drafts: list[int], size: int) -> list[tuple[int, int]]:
    """So many requests as that of `decode`, in one batch."""
    outputs: list[list[int]] = [[] for _ in range(size)]
    states = [SamplingState(params, [0], output) for output in outputs]
    guesses = drafts
    while running := [row for row in range(size) if len(outputs[row]) < 2]:
        before = [token for row in running for token in (outputs[row][-1] if outputs[row] else 0, *guesses)]
        draws = [states[row].after(guesses[:n]) for row in running for n in range(len(guesses) + 1)]
        tokens = sampler(TABLE[before], draws).token_ids
        for row, start in zip(running, range(0, len(tokens), len(guesses) + 1), strict=True):
            drawn = tokens[start : start + len(guesses) + 1]
            kept = num_kept(guesses, drawn)
            states[row].take_back(len(drawn) - kept)
            outputs[row] += drawn[:kept]
        guesses = []  # the first step alone verifies
    return [(output[0], output[1]) for output in outputs]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.7, "temperature": 1.3},
    {"min_p": 0.2},
    {"presence_penalty": 1.0, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    """Pairs of tokens, against the exact probabilities, whatever the drafts are: likely, unlikely or impossible."""
    draws = 2500
    exact = exact_pairs(SamplingParams(**settings))
    possible = [pair for pair, p in exact.items() if p * draws >= 5]
    likely = max(exact, key=lambda pair: exact[pair])
    unlikely = min(possible, key=lambda pair: exact[pair])
    for drafts in ([likely[0], likely[1]], [unlikely[0], unlikely[1]], [likely[0]], [(likely[0] + 1) % VOCABULARY, 0]):
        sampler = Sampler(seed=len(drafts))
        params = SamplingParams(**settings)
        seen = Counter(decode_batch(sampler, params, drafts, draws))
        assert seen.keys() <= exact.keys()
        observed = [seen[pair] for pair in possible]
        expected = [exact[pair] * draws for pair in possible]
        if sum(expected) < draws - 1:  # what is rare is counted together
            observed.append(draws - sum(observed))
            expected.append(draws - sum(expected))
        scale = sum(observed) / sum(expected)
        assert p_value(observed, [e * scale for e in expected]) > 1e-3


def exact_pairs(params: SamplingParams) -> dict[tuple[int, int], float]:
    """Probabilities, by draws with evenly spread numbers: the sampler inverts the cumulative distribution."""
    first = exact_row(params, [])
    pairs = {(a, b): first[a] * p for a in range(VOCABULARY) if first[a] for b, p in enumerate(exact_row(params, [a]))}
    return {pair: p for pair, p in pairs.items() if p > 0}


def exact_row(params: SamplingParams, output: list[int]) -> list[float]:
    grid = 20000
    logits = TABLE[output[-1:] or [0]].clone()
    process_logits(logits, [SamplingState(params, [0], output)])
    numbers = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    tokens = draw(logits.repeat(grid, 1), [params] * grid, numbers)
    return (tokens.bincount(minlength=VOCABULARY) / grid).tolist()


def p_value(observed: list[int], expected: list[float]) -> float:
    """Pearson's chi-square test of counts with the same sum."""
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    half = torch.tensor([(len(observed) - 1) / 2, statistic / 2], dtype=torch.float64)
    probability: float = torch.special.gammaincc(half[0], half[1]).item()
    return probability


def test_the_test_can_fail() -> None:
    assert p_value([100, 110, 90], [100.0, 100.0, 100.0]) == pytest.approx(0.3679, abs=1e-4)
    assert p_value([150, 50], [100.0, 100.0]) < 1e-6
    # a verifier that draws again after a rejection, with the draft allowed, would be found out
    exact = exact_row(SamplingParams(), [])
    twice = [(1 - exact[0]) * p + (exact[0] if token == 0 else 0.0) for token, p in enumerate(exact)]
    assert p_value([round(6000 * p) for p in twice], [6000 * p for p in exact]) < 1e-3


def test_seeded_draws_are_those_of_plain_decoding() -> None:
    for settings in SETTINGS:
        for seed in range(40):
            params = SamplingParams(**settings, seed=seed)
            plain = decode(Sampler(0), params, [])
            assert decode(Sampler(0), params, list(plain)) == plain
            assert decode(Sampler(0), params, [plain[0], (plain[1] + 1) % VOCABULARY]) == plain
            assert decode(Sampler(0), params, [(plain[0] + 1) % VOCABULARY, 0, 0]) == plain


def test_greedy_drafts_are_verified_with_their_own_history() -> None:
    for settings in SETTINGS:
        params = SamplingParams(**(settings | {"temperature": 0.0}))
        plain = decode(Sampler(0), params, [])
        for drafts in itertools.product(range(VOCABULARY), repeat=2):
            assert decode(Sampler(0), params, list(drafts)) == plain
