"""95% confidence intervals over questions, paired: every way to answer is weighted by the same draws.

The bootstrap (Efron, 1979) takes percentiles of means of resampled questions. It knows only the values that it saw, and
gives no width to values that are all equal. Shares of questions, such as agreement, have Wilson's interval instead
(1927), which allows for what so few questions have not shown: after 50 of 50 equal answers, up to 7% may still differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean, difference or share with its interval."""

    value: float
    low: float
    high: float


def check_seed(seed: int) -> None:
    """Raise ValueError, before anything is computed, for a seed that `Bootstrap` does not accept."""
    if seed < 0:
        raise ValueError(f"--seed is {seed}: use 0 or more")


class Bootstrap:
    """Resamples of `count` questions, fixed by `seed`."""

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError(f"{count} questions: give 1 or more")
        self._drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of one number per question."""
        return _estimate(float(values.mean()), values[self._drawn].mean(1))

    def difference(self, ours: np.ndarray, theirs: np.ndarray) -> Estimate:
        """Return the difference between the means of two ways to answer."""
        return self.mean(ours - theirs)


def share(count: int, total: int) -> Estimate:
    """Return the share of `count` questions in `total`, with Wilson's interval."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    value = count / total
    middle = (value + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(value * (1 - value) / total + z * z / (4 * total * total))
    return Estimate(value, max(0.0, middle - half), min(1.0, middle + half))


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """Return the ratio of the medians of two ways' positive numbers, `ours` over `theirs`: one for each question, which
    is resampled with both."""
    numbers = np.array([ours, theirs], np.float64)
    drawn = np.random.default_rng(seed).integers(len(ours), size=(RESAMPLES, len(ours)))
    resampled = np.median(numbers[:, drawn], axis=2)
    value, other = np.median(numbers, axis=1)
    return _estimate(float(value / other), resampled[0] / resampled[1])


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))
