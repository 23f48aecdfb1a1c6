from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.layers.sampling import state
from vllm_blend.layers.sampling_state import TokenLists, check_stop
from vllm_blend.sampling_params import SamplingParams

CASES: list[tuple[list[int], dict[str, Any], tuple[str, int | None] | None]] = [
    ([5], {}, None),
    ([5, 0], {}, ("stop", None)),
    ([5, 0], {"ignore_eos": True}, None),
    ([5, 0], {"ignore_eos": True, "stop_token_ids": [0]}, ("stop", 0)),
    ([5, 9], {"stop_token_ids": [9]}, ("stop", 9)),
    ([5, 9], {"stop_token_ids": [9], "min_tokens": 3}, None),
    ([5, 9], {"stop_token_ids": [9], "min_tokens": 2}, ("stop", 9)),
    ([5, 6, 7], {"max_tokens": 3}, ("length", None)),
    ([5, 6], {"max_tokens": 3}, None),
    ([5, 6, 0], {"max_tokens": 3}, ("stop", None)),
    ([5] * 40, {"max_tokens": None}, None),
    ([5] * 98, {"max_tokens": None}, ("length", None)),
    ([5] * 98, {"max_tokens": None, "min_tokens": 200}, ("length", None)),
]


@pytest.mark.parametrize(("output", "settings", "expected"), CASES, ids=str)
def test_check_stop(output: list[int], settings: dict[str, Any], expected: tuple[str, int | None] | None) -> None:
    sequence = state([1, 2], output, **settings)
    assert check_stop(sequence, output[-1], 2 + len(output), 100) == expected


def test_logits_are_changed_until_min_tokens() -> None:
    sequence = state([1], [], temperature=0, min_tokens=1)
    assert sequence.changes_logits
    sequence.output_token_ids.append(4)
    assert not sequence.changes_logits


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({"temperature": 0}, False),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 3}, False),
        ({"logit_bias": {1: 1.0}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"bad_words": [(3,)]}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
    ids=str,
)
def test_which_settings_change_logits(settings: dict[str, Any], changes: bool) -> None:
    assert state(**settings).changes_logits is changes


def test_a_seed_fixes_the_numbers() -> None:
    """However many are drawn ahead: one by one, the generator gives the same."""
    generator = torch.Generator().manual_seed(5)
    expected = [torch.rand((), dtype=torch.float64, generator=generator).item() for _ in range(150)]
    sequence = state(seed=5)
    assert [sequence.next_uniform() for _ in range(150)] == expected


class CountingDict(dict[Any, Any]):
    """A dict that counts how often it is asked."""

    num_asked = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.num_asked += 1
        return super().get(key, default)


def test_bad_words_are_looked_up_by_their_lengths() -> None:
    """A step asks once for each length of a bad word, however many words there are, and equals a look at each."""
    rng = random.Random(0)
    words = [tuple(rng.choices(range(4), k=rng.randint(1, 5))) for _ in range(300)]
    lists = TokenLists(SamplingParams(), (), words)
    ends = lists.__dict__["_ends_of_words"] = CountingDict(lists._ends_of_words)
    for step in range(1, 100):
        output = rng.choices(range(4), k=rng.randint(0, 6))
        longer = {last for *start, last in words if start and output[-len(start) :] == start}
        assert lists.banned_after(output) == longer
        assert ends.num_asked <= 4 * step
    assert set(lists.always_banned.tolist()) == {word[0] for word in words if len(word) == 1}
