"""The automaton of stop strings: what it finds and holds back, and how much work it does."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny_tokenizers import byte_level
from vllm_blend.detokenizer import Detokenizer
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.stop_strings import StopStrings, _known

pytestmark = pytest.mark.cpu_only


class Counting(dict[int, int]):
    """A dict that counts how often it is asked."""

    num_asked = 0

    def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self.num_asked += 1
        return super().get(key, default)


@settings(max_examples=300, deadline=None)
@given(
    strings=st.lists(st.text("abc😀", min_size=1, max_size=5), min_size=1, max_size=6),
    text=st.text("abc😀", max_size=30),
)
def test_states_say_what_ends_here_and_what_may_go_on(strings: list[str], text: str) -> None:
    automaton, state = StopStrings(strings), 0
    beginnings = {string[:length] for string in strings for length in range(1, len(string))}
    for end, character in enumerate(text, start=1):
        state = automaton.step(state, character)
        read = text[:end]
        assert automaton.found[state] == max([0, *(len(each) for each in strings if read.endswith(each))])
        assert automaton.held[state] == max([0, *(len(each) for each in beginnings if read.endswith(each))])


def test_work_does_not_grow_with_the_number_of_strings() -> None:
    """With the most strings that a request may have, and text that falls back at every step, a character takes at most
    two look-ups."""
    rng = random.Random(0)
    strings = ["a" * 15 + "".join(rng.choices("abcdefgh", k=1)) for _ in range(1024)]
    text = "".join(rng.choice(("a" * 14, "a" * 15 + "z", "b")) for _ in range(200))
    for some in (strings[:1], strings):
        automaton, state = StopStrings(some), 0
        automaton._next = counting = Counting(automaton._next)
        for character in text:
            state = automaton.step(state, character)
        assert counting.num_asked <= 2 * len(text)
        assert automaton.num_states <= 1 + sum(map(len, some))


def test_completions_share_one_automaton_that_goes_with_them() -> None:
    tokenizer, stops = byte_level(), [f"<{index}>" for index in range(100)]
    several = [Detokenizer(tokenizer, params, [0]) for params in SamplingParams(n=8, stop=stops).for_completions()]
    assert len({id(each._stops) for each in several}) == 1 and tuple(stops) in _known
    for token in tokenizer.encode("the <7", add_special_tokens=False):
        for each in several:
            assert each.append(token) is None and each.stream_text(finished=False) == "the "[: len(each._text)]
    del several, each
    gc.collect()
    assert tuple(stops) not in _known
