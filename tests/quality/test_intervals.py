"""Intervals: what they cover, and what is paired."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_blend.quality.intervals import Bootstrap, ratio_of_medians, share

pytestmark = pytest.mark.cpu_only


def test_the_interval_of_a_mean_is_about_two_standard_errors() -> None:
    values = np.array([1.0] * 60 + [0.0] * 40)
    estimate = Bootstrap(100, seed=0).mean(values)
    assert estimate.value == 0.6
    assert estimate.low == pytest.approx(0.6 - 1.96 * 0.049, abs=0.012)
    assert estimate.high == pytest.approx(0.6 + 1.96 * 0.049, abs=0.012)


def test_a_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(5).random(40)
    assert Bootstrap(40, 3).mean(values) == Bootstrap(40, 3).mean(values)
    assert Bootstrap(40, 3).mean(values) != Bootstrap(40, 4).mean(values)


def test_differences_are_paired() -> None:
    theirs = np.random.default_rng(1).random(50)
    estimate = Bootstrap(50, 0).difference(theirs + 0.25, theirs)
    assert estimate.low == pytest.approx(0.25) and estimate.high == pytest.approx(0.25)


def test_no_questions_are_an_error() -> None:
    with pytest.raises(ValueError, match="0 questions"):
        Bootstrap(0, 0)


@pytest.mark.parametrize(("count", "total"), [(0, 9), (7, 20), (50, 50), (199, 200)])
def test_the_bounds_of_a_share_are_where_it_is_two_standard_errors_off(count: int, total: int) -> None:
    estimate = share(count, total)
    for bound in (estimate.low, estimate.high):
        if 0 < bound < 1:
            error = (bound * (1 - bound) / total) ** 0.5
            assert abs(estimate.value - bound) / error == pytest.approx(1.96, abs=1e-3)
    assert 0 <= estimate.low < estimate.high <= 1 and estimate.low <= estimate.value <= estimate.high


def test_equal_answers_leave_room() -> None:
    assert share(50, 50).low == pytest.approx(0.93, abs=0.002) and share(1, 1).low < 0.25


def test_the_ratio_of_medians_is_paired() -> None:
    times = np.random.default_rng(2).random(30) + 1
    ratio = ratio_of_medians(list(2 * times), list(times))
    assert [ratio.value, ratio.low, ratio.high] == pytest.approx([2, 2, 2])
