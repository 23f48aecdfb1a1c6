"""What a plan moves, case by case."""

from __future__ import annotations

import pytest

from vllm_blend.features.offload.planner import ChunkView, MovePolicy, Plan, Snapshot, plan_request
from vllm_blend.features.offload.residency import Residency

IN, OUT, LEAVES, COMES = (True, False), (False, False), (True, True), (False, True)  # resident, moving


def plan(resident_chunks: int, *chunks: tuple[float, tuple[bool, bool]], unsettled: int | None = None) -> object:
    """The plan for chunks with these scores and places: what leaves and what comes, or None."""
    views = tuple(
        ChunkView(index, score, *place, settled=index != unsettled) for index, (score, place) in enumerate(chunks)
    )
    policy = MovePolicy(resident_chunks, 1.0, bytes_per_step=1, margin=0.1)
    made = plan_request(Snapshot(Residency([], [], []), 7, views), policy)
    assert made is None or (isinstance(made, Plan) and made.version == 7)
    return None if made is None else (made.evict, made.promote)


@pytest.mark.parametrize(
    ("resident_chunks", "chunks", "expected"),
    [
        (1, [(0.1, LEAVES), (0.9, OUT), (0.8, OUT)], None),  # the one that leaves still takes its place
        (2, [(0.1, LEAVES), (0.9, OUT), (0.8, OUT)], ((), (1,))),
        (2, [(0.1, LEAVES), (0.5, IN), (0.9, OUT), (0.8, OUT)], None),
        (2, [(0.9, COMES), (0.5, IN), (0.3, OUT)], None),  # what is on its way counts as arrived
        (1, [(0.9, COMES), (0.5, IN), (0.3, OUT)], ((1,), ())),
        (0, [(0.9, IN), (0.5, IN)], ((1, 0), ())),
    ],
)
def test_promotions_wait_until_those_that_leave_are_gone(
    resident_chunks: int, chunks: list[tuple[float, tuple[bool, bool]]], expected: object
) -> None:
    assert plan(resident_chunks, *chunks) == expected


@pytest.mark.parametrize(
    ("inside", "outside", "swaps"),
    [
        (1.0, 1.09, False),
        (1.0, 1.11, True),
        (-1.0, -0.95, False),  # higher, but not by a tenth
        (-1.0, -0.85, True),
        (-1.0, -1.05, False),  # lower: a margin that a negative score turns around would take it
        (0.0, 0.01, True),
        (0.0, 0.0, False),
    ],
)
def test_a_swap_needs_a_lead_whatever_the_sign_of_the_scores(inside: float, outside: float, swaps: bool) -> None:
    assert plan(1, (inside, IN), (outside, OUT)) == (((0,), ()) if swaps else None)


@pytest.mark.parametrize("unsettled", [0, 1])
def test_what_has_just_moved_is_not_swapped(unsettled: int) -> None:
    assert plan(1, (0.1, IN), (0.9, OUT)) == ((0,), ())
    assert plan(1, (0.1, IN), (0.9, OUT), unsettled=unsettled) is None
