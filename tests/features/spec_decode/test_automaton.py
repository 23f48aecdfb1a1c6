from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.features.spec_decode.automaton import NO_MATCH, AutomatonCache, SuffixAutomaton

TOKENS = st.lists(st.integers(0, 2), max_size=24)


def longest(text: list[int], read: list[int]) -> int:
    """Return how many of the last tokens of `read` stand somewhere in `text`."""
    runs = {tuple(text[i:j]) for i in range(len(text)) for j in range(i, len(text) + 1)} | {()}
    return max(n for n in range(len(read) + 1) if tuple(read[len(read) - n :]) in runs)


@given(text=TOKENS, read=TOKENS)
def test_matches_are_the_longest_and_end_where_the_first_one_does(text: list[int], read: list[int]) -> None:
    automaton, match = SuffixAutomaton(text), NO_MATCH
    for n, token in enumerate(read, 1):
        match = automaton.step(match, token)
        length = match[1]
        assert length == longest(text, read[:n])
        if length:
            run = read[n - length : n]
            first = next(end for end in range(length, len(text) + 1) if text[end - length : end] == run)
            assert automaton.end(match) == first


@given(text=TOKENS)
def test_a_text_is_matched_with_itself_while_it_grows(text: list[int]) -> None:
    """Tokens are read before they are appended, so that a match is always an earlier one."""
    automaton, match = SuffixAutomaton(), NO_MATCH
    for n, token in enumerate(text, 1):
        match = automaton.step(match, token)
        automaton.append(token)
        assert match[1] == longest(text[: n - 1], text[:n])
        if match[1]:
            end = automaton.end(match)
            assert end < n
            assert text[end - match[1] : end] == text[n - match[1] : n]


def test_a_chunk_is_read_once() -> None:
    cache = AutomatonCache()
    assert cache.get([1, 2, 3]) is cache.get((1, 2, 3))
    assert cache.num_built == 1


def test_the_cache_keeps_to_its_size() -> None:
    cache = AutomatonCache(max_tokens=10)
    first = cache.get([1] * 4)
    cache.get([2] * 4)
    assert cache.get([1] * 4) is first
    cache.get([3] * 4)  # the second was used least recently
    assert cache.num_tokens == 8
    assert cache.get([1] * 4) is first
    assert cache.num_built == 3
    cache.get([4] * 50)  # larger than all: alone
    assert cache.num_tokens == 50
