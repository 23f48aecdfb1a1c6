"""Every drafter of the registry, and what each of them copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.features.spec_decode.engines import real_drafters
from vllm_blend.features.spec_decode.drafters import (
    DRAFTERS,
    Drafter,
    History,
    NGram,
    Suffix,
    make_drafter,
    register_drafter,
)

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)
METHODS = pytest.mark.parametrize("method", real_drafters())


def bounds_of(prompt: list[int], cuts: list[int]) -> list[tuple[int, int]]:
    """Chunks between every other pair of cuts."""
    at = sorted(cut % (len(prompt) + 1) for cut in cuts)
    return [(a, b) for a, b in zip(at[::2], at[1::2], strict=False) if a < b]


@METHODS
@given(prompt=TOKENS, output=TOKENS, cuts=st.lists(st.integers(0, 30), max_size=6), count=st.integers(1, 9))
def test_drafts_depend_on_the_sequence_alone(
    method: str, prompt: list[int], output: list[int], cuts: list[int], count: int
) -> None:
    """Asked after every token or only at the end: the same drafts, known tokens, no more than wanted."""
    drafter = make_drafter(method)
    growing: list[int] = []
    asked = History(prompt, growing, bounds_of(prompt, cuts))
    for token in output:
        growing.append(token)
        drafts = drafter.propose(asked, count)
        assert len(drafts) <= count
        assert set(drafts) <= {*prompt, *growing}
    assert drafter.propose(History(prompt, output, bounds_of(prompt, cuts)), count) == drafts
    assert make_drafter(method).propose(History(prompt, output, bounds_of(prompt, cuts)), count) == drafts
    assert growing == output


@METHODS
def test_text_that_repeats_is_copied(method: str) -> None:
    drafter = make_drafter(method)
    assert drafter.propose(History([1, 2, 3, 4, 5, 6, 9], [2, 3]), 3) == [4, 5, 6]


@METHODS
def test_a_loop_is_foreseen_as_a_loop(method: str) -> None:
    drafter = make_drafter(method)
    drafts = drafter.propose(History([9, 8], [5, 6, 5, 6]), 6)
    assert drafts == [5, 6, 5, 6, 5, 6]


@METHODS
def test_nothing_new_is_drafted_from_nothing_known(method: str) -> None:
    assert make_drafter(method).propose(History([1, 2, 3], [4]), 5) == []


@METHODS
@given(prompt=TOKENS, output=TOKENS)
def test_the_longest_match_decides(method: str, prompt: list[int], output: list[int]) -> None:
    """What is drafted first has followed the longest earlier run (of at most three tokens, with n-grams)."""
    text = [*prompt, *output]
    n, most = len(text), 3 if method == "ngram" else len(text)
    length = max(
        (g for g in range(1, min(most, n - 1) + 1) for i in range(n - g) if text[i : i + g] == text[n - g :]), default=0
    )
    drafts = make_drafter(method).propose(History(prompt, output), 1)
    followers = {text[i + length] for i in range(n - length) if text[i : i + length] == text[n - length :]}
    assert bool(drafts) == (length > 0)
    assert set(drafts) <= followers


def test_ngram_settings() -> None:
    history = History([7, 1, 2, 3, 8, 8, 2, 3, 9], [1, 2, 3])
    assert NGram(prompt_lookup_max=3).propose(history, 2) == [8, 8]
    assert NGram(prompt_lookup_max=2).propose(history, 2) == [9, 1]  # of shorter matches the last
    assert NGram(prompt_lookup_max=5, prompt_lookup_min=4).propose(history, 2) == []


def test_chunks_are_read_once_for_all_requests() -> None:
    drafter = Suffix()
    chunk = [1, 2, 3, 4, 5]
    for prefix in ([9], [9, 9], [8, 9, 9]):
        start = len(prefix)
        history = History([*prefix, *chunk, 7], [2, 3], [(start, start + 5)])
        assert drafter.propose(history, 9) == [4, 5], "a copy ends with its chunk"
    assert drafter.chunks.num_built == 1


def test_of_equal_matches_the_sequences_own_comes_first_then_the_last_chunk() -> None:
    prompt = [1, 2, 3, 4, 1, 2, 5, 6]
    chunks = [(0, 4), (4, 8)]
    assert Suffix().propose(History(prompt, [1, 2], chunks), 2) == [5, 6]
    assert Suffix().propose(History([*prompt, 1, 2, 7], [1, 2], chunks), 2) == [7, 1]
    assert Suffix(min_match=3).propose(History(prompt, [1, 2], chunks), 2) == []


def test_a_drafter_of_ones_own() -> None:
    @register_drafter
    @dataclass(frozen=True)
    class Always(Drafter):
        name: ClassVar[str] = "always"
        token: int = 1

        def propose(self, history: History, count: int) -> list[int]:
            return [self.token] * count

    try:
        assert make_drafter("always").propose(History([1], []), 2) == [1, 1]
        with pytest.raises(ValueError, match="registered already"):
            register_drafter(type("Other", (Always,), {}))
        with pytest.raises(ValueError, match="class attribute `name`"):
            register_drafter(type("Nameless", (Always,), {"name": ""}))
    finally:
        del DRAFTERS["always"]


@pytest.mark.parametrize("method", real_drafters())
def test_a_drafter_copies_from_chunks_and_from_outside(method: str) -> None:
    prompt = [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3]  # chunks 1 .. 4 and 5 .. 8; the text ends as chunk 0 begins
    if method != "suffix":
        assert make_drafter(method).propose(History(prompt, [4], [(1, 5), (5, 9)]), 2) == [5, 6]
    assert make_drafter(method).propose(History(prompt[:-1], [], [(1, 5), (5, 9)]), 2) == [3, 4]
    assert make_drafter(method).propose(History([1, 2, 7, 7, 3, 1], [], [(2, 4)]), 1) == [2]
