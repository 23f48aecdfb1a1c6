from __future__ import annotations

import itertools

import pytest

from vllm_blend.features.spec_decode.drafters import NGram
from vllm_blend.features.spec_decode.length import LEAST_RATE, LONGEST_START, DraftLength
from vllm_blend.features.spec_decode.speculation import Speculator


def lengths(length: DraftLength, accepted: int, steps: int, num_sequences: int = 1) -> list[int]:
    """Return what is drafted in so many steps when at most `accepted` tokens of a draft are right."""
    drafted = []
    for _ in range(steps):
        drafted.append(length.next(num_sequences))
        if drafted[-1]:
            length.verified(drafted[-1], min(accepted, drafted[-1]))
    return drafted


def test_what_always_fails_is_hardly_drafted() -> None:
    length = DraftLength(8)
    drafted = lengths(length, 0, 400)
    assert drafted[0] > 0
    assert sum(map(bool, drafted[:100])) <= 10
    assert sum(map(bool, drafted[100:])) <= 10
    assert max(drafted[20:]) <= 2, "a trial is short"


def test_what_always_succeeds_is_drafted_in_full() -> None:
    assert lengths(DraftLength(8), 8, 30)[5:] == [8] * 25


def test_drafting_starts_again_when_it_pays_again() -> None:
    length = DraftLength(8)
    lengths(length, 0, 200)
    drafted = lengths(length, 8, 100)
    assert drafted[-20:] == [8] * 20


def test_drafts_are_as_long_as_what_is_accepted() -> None:
    few, some, many = (lengths(DraftLength(64), n, 40)[-1] for n in (1, 3, 9))
    assert 0 < few < some < many


def test_many_sequences_pay_for_each_others_rows() -> None:
    alone, beside, crowded = (lengths(DraftLength(8), 2, 20, n)[-1] for n in (1, 10, 200))
    assert alone > beside > crowded == 0


@pytest.mark.parametrize("accepted", range(9))
def test_lengths_keep_to_their_bounds(accepted: int) -> None:
    assert all(0 <= n <= 8 for n in lengths(DraftLength(8), accepted, 100))


def test_a_new_sequence_begins_where_the_latest_stands() -> None:
    speculator = Speculator(NGram(), 4)
    first = speculator.begin([1, 2, 1], [2], ())
    while first.length.wait == 0:
        assert first.propose(1, 4)
        first.length.verified(4, 0)
    assert first.length.rate < LEAST_RATE
    second = speculator.begin([1, 2, 1], [2], ())
    assert second.propose(1, 4) == []
    for _ in range(first.length.wait):
        second.propose(1, 4)
    assert second.propose(1, 4)
    assert first.length.wait > 0, "each counts for itself"


def test_a_limit_is_kept() -> None:
    speculation = Speculator(NGram(), 8).begin([1, 2, 3, 4, 5, 1], [2], ())
    assert speculation.propose(1, 2) == [3, 4]
    assert speculation.propose(1, 0) == []


def test_looks_that_find_nothing_become_rarer_where_they_cost_something() -> None:
    length = DraftLength(8)
    looks = []
    for step in range(100):
        if length.is_idle(1):
            length.skip_step()
            continue
        assert length.next() > 0
        looks.append(step)
        length.searched(False)
    assert looks[:5] == [0, 2, 5, 10, 19]
    assert {b - a for a, b in itertools.pairwise(looks[5:])} == {17}
    length.wait = 0
    length.searched(True)
    assert not length.is_idle(1) and length.is_idle(100), "100 sequences pay too much for each others' rows"


def test_one_right_token_is_enough_to_go_on() -> None:
    length = DraftLength(8)
    lengths(length, 0, 200)
    while not length.next():
        pass
    length.verified(2, 1)
    assert length.rate < LEAST_RATE and length.next() > 0


def test_a_new_sequence_tries_before_long() -> None:
    length = DraftLength(8)
    lengths(length, 0, 100)
    length.wait = length.pause = 64
    assert next(step for step in range(100) if length.successor().wait <= step) == LONGEST_START
    assert length.successor().pause == 64, "and then waits as long as the one before"
