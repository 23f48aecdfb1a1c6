"""Fewer cases of every test, for tools under which each takes many times as long: the variable CASES says how many."""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

MOST = int(os.environ.get("CASES", "0"))  # 0: all


def examples(count: int) -> int:
    """Return how many examples hypothesis draws where a test wants `count`."""
    return min(count, MOST) if MOST else count


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return at most CASES of each test, evenly spread over its cases, in their order."""
    by_test = defaultdict(list)
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    kept = {case for cases in by_test.values() for case in cases[:: -(-len(cases) // MOST) if MOST else 1]}
    return [item for item in items if item in kept]
