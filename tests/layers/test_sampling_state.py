from __future__ import annotations

from typing import Any

import pytest

from tests.layers.sampling import state
from vllm_blend.layers.sampling_state import check_stop

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
def test_check_stop(output: list[int], settings: dict[str, Any], expected: tuple[str, int | None] | None):
    sequence = state([1, 2], output, **settings)
    assert check_stop(sequence, output[-1], 2 + len(output), 100) == expected


def test_argmax_only_follows_min_tokens():
    sequence = state([1], [], temperature=0, min_tokens=1)
    assert not sequence.argmax_only
    sequence.output_token_ids.append(4)
    assert sequence.argmax_only


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0, "logit_bias": {1: 1.0}},
        {"temperature": 0, "allowed_token_ids": [1]},
        {"temperature": 0, "bad_words": [(3,)]},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"temperature": 0, "presence_penalty": 0.1},
        {"temperature": 0, "frequency_penalty": 0.1},
    ],
    ids=str,
)
def test_other_settings_need_more_than_argmax(settings: dict[str, Any]):
    assert not state(**settings).argmax_only
