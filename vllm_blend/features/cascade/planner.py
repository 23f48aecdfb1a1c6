"""The plan of cascade attention: the blocks that the requests of a step share, for as long as they stay together.

Requests share pages by reference where they began with the same composition (its pages are retained) or with the same
exact prefix. Equal block numbers are all there is to know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_blend.features.cascade.backend import CascadeData, SharedSegment
from vllm_blend.worker.batch import Span

MAX_LEVELS = 4


def min_saved_tokens(on_gpu: bool) -> int:
    """Return how many keys a segment must keep from being read again, below which another part costs more than it
    saves. On an H200 the prefill kernel takes 22 us for 32 queries over 4096 keys (benchmarks/results/h200_kernels.md),
    the time in which decoding reads some 23,000 keys of eight KV heads of 128."""
    return 1 << 15 if on_gpu else 1 << 10


class CascadePlanner:
    """Plans steps. The requests of a batch decode together for many steps, in which nothing changes but their ends."""

    def __init__(self, block_size: int, min_saved_tokens: int, max_levels: int = MAX_LEVELS) -> None:
        self.block_size, self.max_levels = block_size, max_levels
        self.min_saved_blocks = max(1, min_saved_tokens // block_size)
        self._tables: list[list[int]] = []  # of the last plan: the requests' own lists, which end with their residence
        self._shareable: list[int] = []
        self._data: CascadeData | None = None

    def plan(self, spans: Sequence[Span]) -> CascadeData | None:
        """Return what the spans of a step share, None if that is too little. More blocks may be shared than a plan says
        that was made when the requests were shorter; never fewer."""
        tables = [span.request.block_table for span in spans]
        shareable = [span.start // self.block_size if span.positions is None else 0 for span in spans]
        same = len(tables) == len(self._tables) and all(a is b for a, b in zip(tables, self._tables, strict=True))
        if not (same and all(now >= then for now, then in zip(shareable, self._shareable, strict=True))):
            padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
            for row, table in zip(padded, tables, strict=True):
                row[: len(table)] = table
            self._data = build_cascade_data_for_composition(padded, shareable, self.min_saved_blocks, self.max_levels)
            self._tables, self._shareable = tables, shareable
        return self._data


def build_cascade_data_for_composition(
    block_tables: np.ndarray,
    num_shareable: Sequence[int],
    min_saved_blocks: int,
    max_levels: int = MAX_LEVELS,
) -> CascadeData | None:
    """Return the levels of shared blocks of a step; None if no segment saves `min_saved_blocks` (its blocks times
    all its requests but one).

    block_tables [requests, width]; `num_shareable` is how many leading blocks of each request are full and come before
    its first row of the step: only these may be shared. A level splits where the tables do: requests over one system
    prompt, of which some have their passages in common too, have two.
    """
    levels: list[list[SharedSegment]] = []
    own_start = [0] * len(num_shareable)

    def visit(requests: list[int], start: int, stop: int, depth: int) -> None:
        """Add segments of `requests`, which have the blocks before `stop` in common; earlier levels have those before
        `start`."""
        if (stop - start) * (len(requests) - 1) >= min_saved_blocks:
            levels.extend([] for _ in range(depth + 1 - len(levels)))
            levels[depth].append(SharedSegment(tuple(requests), start, stop))
            for request in requests:
                own_start[request] = stop
            start, depth = stop, depth + 1
        if depth == max_levels:
            return
        groups: dict[int, list[int]] = {}
        for request in requests:
            if num_shareable[request] > stop:
                groups.setdefault(int(block_tables[request, stop]), []).append(request)
        for group in groups.values():
            if len(group) > 1:
                longest = min(num_shareable[request] for request in group)
                visit(group, start, _common(block_tables, group, stop, longest), depth)

    if min_saved_blocks < 1:
        raise ValueError(f"min_saved_blocks={min_saved_blocks} must be positive")
    visit(list(range(len(num_shareable))), 0, 0, 0)
    if not levels:
        return None
    return CascadeData(tuple(tuple(level) for level in levels), tuple(own_start))


def _common(block_tables: np.ndarray, group: Sequence[int], start: int, stop: int) -> int:
    """Return up to which block the tables of a group are equal, at most `stop`."""
    tables = block_tables[group, start:stop]
    differs = (tables != tables[0]).any(0)
    return start + int(differs.argmax()) if differs.any() else stop
