"""Which pages the requests of a step share: the plan of cascade attention.

Requests share pages by reference where they began with the same composition (its pages are retained) or with the same
exact prefix. Equal block numbers are all there is to know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_blend.attention.cascade import CascadeData, Segment


def build_cascade_data_for_composition(
    block_tables: np.ndarray,
    num_shareable: Sequence[int],
    min_saved_blocks: int,
    max_levels: int = 4,
) -> CascadeData | None:
    """The levels of shared blocks of a step, None where no segment saves `min_saved_blocks` (its blocks times all its
    requests but one).

    block_tables [requests, width]; `num_shareable` is how many leading blocks of each request are full and come before
    its first row of the step: only these may be shared. A level splits where the tables do: requests over one system
    prompt, of which some have their passages in common too, have two.
    """
    levels: list[list[Segment]] = []
    own_start = [0] * len(num_shareable)

    def visit(requests: list[int], start: int, stop: int, depth: int) -> None:
        """All of `requests` have the blocks before `stop` in common; those before `start` belong to earlier levels."""
        if (stop - start) * (len(requests) - 1) >= min_saved_blocks:
            levels.extend([] for _ in range(depth + 1 - len(levels)))
            levels[depth].append(Segment(tuple(requests), start, stop))
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
    """Up to which block the tables of a group are equal, at most `stop`."""
    tables = block_tables[group, start:stop]
    differs = (tables != tables[0]).any(0)
    return start + int(differs.argmax()) if differs.any() else stop
