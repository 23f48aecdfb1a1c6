"""A histogram that takes many equal values at a time, as an answer that is read at its end has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf, isinf

from prometheus_client.core import HistogramMetricFamily

# 1 ms to 500 s
SECONDS = tuple(digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5))
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """Counts values by upper bounds. `name` and `help` are what Prometheus shows."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value; one that a clock that was set back has made negative is 0."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def family(self, labels: Sequence[str], values: Sequence[str]) -> HistogramMetricFamily:
        """Return the histogram as Prometheus's client writes it."""
        family = HistogramMetricFamily(self.name, self.help, labels=labels)
        buckets, count = [], 0
        for bound, number in zip([*self.bounds, inf], self.counts, strict=True):
            count += number
            buckets.append(("+Inf" if isinf(bound) else str(bound), float(count)))
        family.add_metric(values, buckets, self.total)
        return family
