"""How many tokens of a blended prompt were found stored, were encoded for it, or were computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm_blend.worker.model_runner import BlendResult


@dataclass(frozen=True)
class ReuseCounts:
    """Tokens of a prompt. `exact`, `reused`, `encoded` and `recomputed` make up the prompt; `found` has the first two
    by where they were found."""

    exact: int
    reused: int
    encoded: int
    recomputed: int
    found: Mapping[str, int]

    @property
    def num_found(self) -> int:
        return self.exact + self.reused


def count_reuse(result: BlendResult) -> ReuseCounts:
    """Count what a blend has kept of stored KV, and what it has computed."""
    plan = result.plan
    kept = np.ones(plan.suffix_start, bool)
    kept[result.computed_on_host.wait().numpy()] = False
    found = Counter[str]()
    exact = encoded = 0
    for segment in plan.segments:
        count = int(kept[segment.start : segment.stop].sum())
        if segment.found_in is None:
            encoded += count
            continue
        found[segment.found_in] += count
        exact += count if segment.exact else 0
    recomputed = len(result.computed) + plan.num_prompt_tokens - plan.suffix_start
    return ReuseCounts(exact, found.total() - exact, encoded, recomputed, +found)
