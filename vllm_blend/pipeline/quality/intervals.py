"""Bootstrap confidence intervals over questions (Efron, 1979): percentiles of means of the same resampled questions for
every setting, so that differences and shares are paired."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A mean, difference or share with its interval; None where that is not defined."""

    value: float
    low: float | None
    high: float | None


def check_seed(seed: int) -> None:
    """ValueError, before anything is computed, for a seed that a `Bootstrap` does not take."""
    if seed < 0:
        raise ValueError(f"--seed is {seed}: use 0 or more")


class Bootstrap:
    """Resamples of `count` questions, fixed by `seed`."""

    def __init__(self, count: int, seed: int, resamples: int = RESAMPLES) -> None:
        if count < 1 or resamples < 1:
            raise ValueError(f"{count} questions and {resamples} resamples: both must be 1 or more")
        self._rows = np.random.default_rng(seed).integers(count, size=(resamples, count))

    def mean(self, values: np.ndarray) -> Estimate:
        """Of one number per question."""
        return _estimate(float(values.mean()), self._means(values))

    def difference(self, ours: np.ndarray, theirs: np.ndarray) -> Estimate:
        """Of the means of two settings."""
        return self.mean(ours - theirs)

    def ratio(self, ours: np.ndarray, theirs: np.ndarray) -> Estimate | None:
        """Of the means of two settings, ours by theirs. None where theirs is 0; its interval likewise."""
        if theirs.mean() <= 0:
            return None
        return self._share(ours, theirs)

    def recovered(self, ours: np.ndarray, reuse: np.ndarray, full: np.ndarray) -> Estimate | None:
        """(ours - reuse) / (full - reuse) of the means: 0 as plain reuse, 1 as full prefill. None where reuse loses
        nothing; its interval, where that is so in more resamples than it leaves out on one side."""
        if full.mean() <= reuse.mean():
            return None
        return self._share(ours - reuse, full - reuse)

    def _share(self, part: np.ndarray, whole: np.ndarray) -> Estimate:
        """Of two means. Resamples in which the whole is not positive are left out; with too many, so is the
        interval."""
        parts, wholes = self._means(part), self._means(whole)
        defined = wholes > 0
        value = float(part.mean() / whole.mean())
        if (~defined).mean() > (1 - LEVEL) / 2:
            return Estimate(value, None, None)
        return _estimate(value, parts[defined] / wholes[defined])

    def _means(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(values, np.float64)[self._rows].mean(1)


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))
