"""Confidence intervals over questions, paired: every setting is weighted by the same draws.

The bootstrap (Efron, 1979) takes percentiles of means of resampled questions. It knows only the scores that it saw: its
intervals have no width for one question, or for scores that are all equal. If a verdict rests on few questions,
`SmallSampleIntervals` are the honest ones.

Questions about one world share its passages, so that one passage that misleads may cost several answers. Such questions
are resampled together, world by world (the cluster bootstrap: Davison and Hinkley, "Bootstrap Methods and their
Application", 1997, section 3.8); drawn one by one, they would give intervals that are too narrow.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
DRAWS, BLOCK = 20_000, 500  # draws of weights, and how many are held at a time


@dataclass(frozen=True)
class Estimate:
    """A mean, difference or share with its interval; None if that is undefined."""

    value: float
    low: float | None
    high: float | None


def check_seed(seed: int) -> None:
    """Raise ValueError, before anything is computed, for a seed that `Bootstrap` does not accept."""
    if seed < 0:
        raise ValueError(f"--seed is {seed}: use 0 or more")


class Bootstrap:
    """Resamples of `count` questions, fixed by `seed`. `worlds` has the world of each question (None: each question is
    a world of its own); whole worlds are drawn."""

    def __init__(self, count: int, seed: int, worlds: Sequence[Hashable] | None = None) -> None:
        if count < 1:
            raise ValueError(f"{count} questions: give 1 or more")
        if worlds is not None and len(worlds) != count:
            raise ValueError(f"{len(worlds)} worlds for {count} questions: give one for each question")
        numbers: dict[Hashable, int] = {}
        self._world = np.array([numbers.setdefault(world, len(numbers)) for world in worlds or range(count)])
        self._sizes = np.bincount(self._world).astype(np.float64)  # questions of each world
        drawn = np.random.default_rng(seed).integers(len(numbers), size=(RESAMPLES, len(numbers)))
        self._drawn, self._num_drawn = drawn, self._sizes[drawn].sum(1)

    def score(self, values: np.ndarray) -> Estimate:
        """Return the mean of one score per question, each from 0 to 1."""
        return self.mean(values)

    def mean(self, values: np.ndarray) -> Estimate:
        """Return the mean of one number per question."""
        return _estimate(float(values.mean()), self._means(values))

    def difference(self, ours: np.ndarray, theirs: np.ndarray) -> Estimate:
        """Return the difference between the means of two settings."""
        return self.mean(ours - theirs)

    def ratio(self, ours: np.ndarray, theirs: np.ndarray) -> Estimate | None:
        """Return the ratio of the means of two settings, `ours` over `theirs`. It is None if theirs is 0; so is its
        interval."""
        if theirs.mean() <= 0:
            return None
        return self._share(ours, theirs)

    def recovered(self, ours: np.ndarray, reuse: np.ndarray, full: np.ndarray) -> Estimate | None:
        """Return (ours - reuse) / (full - reuse) of the means: 0 for plain reuse, 1 for full prefill. It is None if
        reuse loses nothing; its interval is None if that is so in more resamples than the interval leaves out on one
        side."""
        if full.mean() <= reuse.mean():
            return None
        return self._share(ours - reuse, full - reuse)

    def _share(self, part: np.ndarray, whole: np.ndarray) -> Estimate:
        """Return the ratio of two means. Resamples in which the whole is not positive are left out; with too many of
        them, so is the interval."""
        parts, wholes = self._means(part), self._means(whole)
        defined = wholes > 0
        value = float(part.mean() / whole.mean())
        if (~defined).mean() > (1 - LEVEL) / 2:
            return Estimate(value, None, None)
        return _estimate(value, parts[defined] / wholes[defined])

    def _means(self, values: np.ndarray) -> np.ndarray:
        means: np.ndarray = self._sums(values)[self._drawn].sum(1) / self._num_drawn
        return means

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of each world's questions."""
        return np.bincount(self._world, np.asarray(values, np.float64))


class SmallSampleIntervals(Bootstrap):
    """Intervals for scores from 0 to 1 that allow for what so few questions have not shown.

    The worst and the best possible score are added to the scores seen, in turn, and all are weighted by draws from a
    flat Dirichlet distribution; the percentiles of the weighted means are the bounds (Learned-Miller and Thomas, "A New
    Confidence Interval for the Mean of a Bounded Random Variable", 2019, arXiv:1905.06208; Gaffke, 2005). For scores of
    0 and 1 that is the exact interval of Clopper and Pearson: after n equal scores, a share of 1 - 0.025 ** (1 / n) may
    still differ. For other scores, that the interval covers as often as it claims is conjectured, and no counterexample
    is known. Of questions in worlds, another world is added, with as many questions as the largest has.
    """

    def __init__(self, count: int, seed: int, worlds: Sequence[Hashable] | None = None) -> None:
        super().__init__(count, seed, worlds)
        self._seed = seed

    def score(self, values: np.ndarray) -> Estimate:
        return self._between(values, np.ones_like(values, np.float64), (0.0, 1.0), (1.0, 1.0))

    def difference(self, ours: np.ndarray, theirs: np.ndarray) -> Estimate:
        return self._between(ours - theirs, np.ones_like(ours, np.float64), (-1.0, 1.0), (1.0, 1.0))

    def ratio(self, ours: np.ndarray, theirs: np.ndarray) -> Estimate | None:
        """Return the ratio as the base class does. That a share is below some bound means that the mean of ours - bound
        * theirs is below 0: such means are bounded, at the worst by questions that only one of the two settings
        answers."""
        if theirs.mean() <= 0:
            return None
        return self._between(ours, theirs, (0.0, 1.0), (1.0, 0.0))

    def _between(
        self, parts: np.ndarray, wholes: np.ndarray, worst: tuple[float, float], best: tuple[float, float]
    ) -> Estimate:
        """Return the share of the means, between the shares with `worst` and with `best` as the part and whole of each
        question of another world."""
        random = np.random.default_rng(self._seed)
        part_of, whole_of, largest = self._sums(parts), self._sums(wholes), self._sizes.max()
        low, high = [], []
        for _ in range(DRAWS // BLOCK):
            weights = random.standard_exponential((BLOCK, len(self._sizes) + 1))  # their shares are Dirichlet
            seen, other = weights[:, :-1], largest * weights[:, -1]
            part, whole = seen @ part_of, seen @ whole_of
            low.append((part + other * worst[0]) / (whole + other * worst[1]))
            high.append((part + other * best[0]) / (whole + other * best[1]))
        value = float(parts.mean() / wholes.mean())
        bounds = (np.quantile(np.concatenate(low), (1 - LEVEL) / 2), np.quantile(np.concatenate(high), (1 + LEVEL) / 2))
        return Estimate(value, float(bounds[0]), float(bounds[1]))


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """Return the ratio of the medians of two settings' positive numbers, `ours` over `theirs`: one for each question,
    which is resampled with both."""
    numbers = np.array([ours, theirs], np.float64)
    drawn = np.random.default_rng(seed).integers(len(ours), size=(RESAMPLES, len(ours)))
    resampled = np.median(numbers[:, drawn], axis=2)
    value, other = np.median(numbers, axis=1)
    return _estimate(float(value / other), resampled[0] / resampled[1])


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high))
