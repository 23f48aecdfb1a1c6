"""Intervals: what they cover, what is paired, and where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from vllm_blend.quality.intervals import Bootstrap, Estimate, SmallSampleIntervals


def test_the_interval_of_a_share_is_about_two_standard_errors() -> None:
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


def known(estimate: Estimate | None) -> Estimate:
    assert estimate is not None
    return estimate


def test_recovered_is_0_for_reuse_and_1_for_full_prefill() -> None:
    full, reuse = np.array([1.0, 1, 1, 1, 1, 0, 1, 1]), np.array([1.0, 0, 0, 0, 0, 0, 1, 0])
    bootstrap = Bootstrap(8, 0)
    for ours, value in ((reuse, 0.0), (full, 1.0)):
        estimate = known(bootstrap.recovered(ours, reuse, full))
        assert (estimate.value, estimate.low, estimate.high) == (value, value, value)
    half = known(bootstrap.recovered((full + reuse) / 2, reuse, full))
    assert half.value == 0.5 and [half.low, half.high] == pytest.approx([0.5, 0.5])


def test_nothing_is_recovered_where_nothing_is_lost() -> None:
    full, better = np.array([1.0, 0, 0, 1]), np.array([1.0, 1, 0, 1])
    bootstrap = Bootstrap(4, 0)
    assert bootstrap.recovered(full, full, full) is None
    assert bootstrap.recovered(full, better, full) is None
    once = known(bootstrap.recovered(better, full, better))  # a third of the resamples lack the one question in four
    assert (once.value, once.low, once.high) == (1.0, None, None)
    assert bootstrap.ratio(full, np.zeros(4)) is None
    most, some = np.ones(10), np.array([1.0] * 6 + [0.0] * 4)  # 0.6% of the resamples lack what is lost
    often = known(Bootstrap(10, 0).recovered(most, some, most))
    assert (often.low, often.high) == (1.0, 1.0)
    assert known(bootstrap.ratio(full, better)).value == pytest.approx(2 / 3)


def test_no_questions_are_an_error() -> None:
    with pytest.raises(ValueError, match="0 questions"):
        Bootstrap(0, 0)


def share_where(probability: Callable[[float], float], level: float) -> float:
    """Return where a probability that rises with the share reaches `level`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return low


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 60), (60, 60), (7, 20), (59, 60)])
def test_few_scores_of_0_and_1_have_the_exact_interval(right: int, count: int) -> None:
    """Clopper's and Pearson's: the shares of which the tails of the binomial distribution are 2.5%."""
    values = np.array([1.0] * right + [0.0] * (count - right))

    def at_least(least: int) -> Callable[[float], float]:
        return lambda p: sum(math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(least, count + 1))

    low = 0.0 if right == 0 else share_where(at_least(right), 0.025)
    high = 1.0 if right == count else share_where(at_least(right + 1), 0.975)
    estimate = SmallSampleIntervals(count, 0).score(values)
    assert estimate.value == right / count
    assert [estimate.low, estimate.high] == pytest.approx([low, high], abs=0.01)


@pytest.mark.parametrize("count", [1, 10, 60])
def test_equal_scores_of_two_settings_leave_room_either_way(count: int) -> None:
    width = 1 - 0.025 ** (1 / count)
    ours = np.full(count, 0.8)
    intervals = SmallSampleIntervals(count, 3)
    difference = intervals.difference(ours, ours)
    assert difference.value == 0 and Bootstrap(count, 3).difference(ours, ours).high == 0
    assert [difference.low, difference.high] == pytest.approx([-width, width], abs=0.01)
    kept = known(intervals.ratio(np.ones(count), np.ones(count)))
    assert kept.value == 1 and kept.low == pytest.approx(1 - width, abs=0.01)
    assert kept.high is not None and kept.high > 1
    assert intervals.ratio(ours, np.zeros(count)) is None


@pytest.mark.parametrize(("count", "right_in_full", "lost", "won"), [(12, 0.9, 0.1, 0.0), (50, 0.8, 0.1, 0.05)])
def test_shares_are_covered_as_often_as_they_say(count: int, right_in_full: float, lost: float, won: float) -> None:
    """The questions are drawn many times and answered by two settings; the bootstrap's intervals cover too few."""
    random, true = np.random.default_rng(0), (right_in_full * (1 - lost) + (1 - right_in_full) * won) / right_in_full
    covered = {SmallSampleIntervals: 0, Bootstrap: 0}
    for trial in range(100):
        full = random.random(count) < right_in_full
        ours = np.where(full, random.random(count) >= lost, random.random(count) < won)
        for kind in covered:
            estimate = known(kind(count, trial).ratio(ours.astype(float), full.astype(float)))
            assert estimate.low is not None and estimate.high is not None
            covered[kind] += estimate.low - 1e-9 <= true <= estimate.high + 1e-9
    assert covered[SmallSampleIntervals] >= 94
    assert covered[Bootstrap] < covered[SmallSampleIntervals]


def drawn(
    random: np.random.Generator, worlds: np.ndarray, lost: float, right_in_full: float = 0.85
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of a setting and of full prefill. Questions about one world are lost, or answered, together
    more often than those of two."""
    count = worlds.max() + 1
    full = random.random(len(worlds)) < random.beta(2 * right_in_full, 2 * (1 - right_in_full), count)[worlds]
    ours = full & (random.random(len(worlds)) >= random.beta(2 * lost, 2 * (1 - lost), count)[worlds])
    return ours.astype(float), full.astype(float)


def test_intervals_over_worlds_cover_as_often_as_they_say() -> None:
    """Those over questions do not: three questions about each of 60 worlds are less than 180 questions."""
    random, worlds = np.random.default_rng(0), np.repeat(np.arange(60), 3)
    covered = {"worlds": 0, "questions": 0}
    for trial in range(100):
        ours, full = drawn(random, worlds, lost=0.3)
        for name, intervals in (
            ("worlds", Bootstrap(180, trial, worlds.tolist())),
            ("questions", Bootstrap(180, trial)),
        ):
            found = (
                (intervals.score(ours), 0.85 * 0.7),
                (intervals.difference(ours, full), -0.85 * 0.3),
                (known(intervals.ratio(ours, full)), 0.7),
            )
            covered[name] += sum(e.low <= true <= e.high for e, true in found if e.low is not None and e.high)
    assert covered["worlds"] >= 0.92 * 300 and covered["questions"] <= 0.89 * 300


def test_what_is_rarely_lost_takes_the_wider_intervals() -> None:
    """A rule that keeps 98% loses a question in few of the worlds, perhaps in none that was seen."""
    random, worlds = np.random.default_rng(0), np.repeat(np.arange(60), 3)
    covered = {SmallSampleIntervals: 0, Bootstrap: 0}
    for trial in range(60):
        ours, full = drawn(random, worlds, lost=0.02)
        for kind in covered:
            estimate = known(kind(180, trial, worlds.tolist()).ratio(ours, full))
            assert estimate.low is not None and estimate.high is not None
            covered[kind] += estimate.low <= 0.98 <= estimate.high + 1e-9
    assert covered[SmallSampleIntervals] >= 58 and covered[Bootstrap] <= 52


def test_a_world_of_its_own_for_each_question_changes_nothing() -> None:
    values = np.random.default_rng(5).random(40)
    for kind in (Bootstrap, SmallSampleIntervals):
        assert kind(40, 3).score(values) == kind(40, 3, range(40)).score(values)


def test_worlds_weigh_as_much_as_they_have_questions() -> None:
    ones, one_each = np.ones(6), SmallSampleIntervals(2, 3).score(np.ones(2))
    exact = Bootstrap(6, 0, [0, 0, 0, 0, 0, 1]).mean(ones)
    assert (exact.low, exact.high) == (1, 1)
    assert SmallSampleIntervals(6, 3, [0, 0, 0, 1, 1, 1]).score(ones).low == pytest.approx(one_each.low)
    lopsided = SmallSampleIntervals(6, 3, [0, 0, 0, 0, 0, 1]).score(ones)  # another world may have five questions
    assert lopsided.low is not None and one_each.low is not None and lopsided.low < one_each.low


def test_as_many_worlds_as_questions_are_needed() -> None:
    with pytest.raises(ValueError, match="39 worlds for 40 questions"):
        Bootstrap(40, 3, range(39))
