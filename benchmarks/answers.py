"""Compare two ways to answer the same questions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

BLENDS: dict[str, dict[str, Any]] = {
    "question attention, 15%": {"blend_selector": "question_attention", "blend_recompute_ratio": 0.15},
    "V deviation, 15%": {"blend_selector": "value_deviation", "blend_recompute_ratio": 0.15},
    "reuse only": {"blend_selector": "none"},
}


def difference(ours: Sequence[float], floor: Sequence[float]) -> str:
    """Return the mean difference of scores from 0 to 1, in points, and its standard error over the questions."""
    gaps = [100 * (a - b) for a, b in zip(ours, floor, strict=True)]
    return f"{statistics.mean(gaps):+.1f} +- {statistics.stdev(gaps) / math.sqrt(len(gaps)):.1f}"


def same_tokens(ours: Sequence[Sequence[int]], whole: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens after the first one that are the same, and in the same place, in `whole`."""
    same = total = 0
    for a, b in zip(ours, whole, strict=True):
        total += max(len(a), len(b)) - 1
        same += sum(x == y for x, y in zip(a[1:], b[1:], strict=False))
    return same / max(1, total)
