"""Bootstrap intervals: what they cover, what is paired, and where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_blend.pipeline.quality.intervals import Bootstrap


def test_the_interval_of_a_share_is_about_two_standard_errors():
    values = np.array([1.0] * 60 + [0.0] * 40)
    estimate = Bootstrap(100, seed=0).mean(values)
    assert estimate.value == 0.6
    assert estimate.low == pytest.approx(0.6 - 1.96 * 0.049, abs=0.012)
    assert estimate.high == pytest.approx(0.6 + 1.96 * 0.049, abs=0.012)


def test_a_seed_gives_the_same_interval():
    values = np.random.default_rng(5).random(40)
    assert Bootstrap(40, 3).mean(values) == Bootstrap(40, 3).mean(values)
    assert Bootstrap(40, 3).mean(values) != Bootstrap(40, 4).mean(values)


def test_differences_are_paired():
    theirs = np.random.default_rng(1).random(50)
    estimate = Bootstrap(50, 0).difference(theirs + 0.25, theirs)
    assert estimate.low == pytest.approx(0.25) and estimate.high == pytest.approx(0.25)


def test_recovered_is_0_for_reuse_and_1_for_full_prefill():
    full, reuse = np.array([1.0, 1, 1, 1, 1, 0, 1, 1]), np.array([1.0, 0, 0, 0, 0, 0, 1, 0])
    bootstrap = Bootstrap(8, 0)
    for ours, value in ((reuse, 0.0), (full, 1.0)):
        estimate = bootstrap.recovered(ours, reuse, full)
        assert (estimate.value, estimate.low, estimate.high) == (value, value, value)
    half = bootstrap.recovered((full + reuse) / 2, reuse, full)
    assert (half.value, half.low, half.high) == (0.5, pytest.approx(0.5), pytest.approx(0.5))


def test_nothing_is_recovered_where_nothing_is_lost():
    full, better = np.array([1.0, 0, 0, 1]), np.array([1.0, 1, 0, 1])
    bootstrap = Bootstrap(4, 0)
    assert bootstrap.recovered(full, full, full) is None
    assert bootstrap.recovered(full, better, full) is None
    once = bootstrap.recovered(better, full, better)  # one question in four: a third of the resamples are without it
    assert (once.value, once.low, once.high) == (1.0, None, None)
    assert bootstrap.ratio(full, np.zeros(4)) is None
    assert bootstrap.ratio(full, better).value == pytest.approx(2 / 3)


def test_no_questions_are_an_error():
    with pytest.raises(ValueError, match="0 questions"):
        Bootstrap(0, 0)
