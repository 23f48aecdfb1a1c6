"""A row under a constraint is drawn as one whose allowed tokens are listed: whatever its other settings are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.layers.sampling import DEVICES, random_logits, state
from tests.layers.test_sampler import FIXED, VOCAB, generate
from vllm_blend.layers.sampler import Sampler

ALLOWED = [0, 3, 5, 31, 32, 63, 64, 95]


@dataclass(frozen=True)
class Listed:
    """Allows these tokens, whatever came before."""

    token_ids: tuple[int, ...]
    error: str | None = None

    def after(self, token_ids: Sequence[int]) -> Listed:
        return self

    def has_ended(self) -> bool:
        return True

    def fill_masks(self, constraints: Sequence[Listed], words: NDArray[np.int32]) -> dict[int, str]:
        assert (words == -1).all()
        for row, constraint in enumerate(constraints):
            bits = np.zeros(32 * words.shape[1], bool)
            bits[list(constraint.token_ids)] = True
            words[row] = np.packbits(bits, bitorder="little").view(np.int32)
        return {row: one.error for row, one in enumerate(constraints) if one.error is not None}


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_acts_as_a_list_of_allowed_tokens(device: str) -> None:
    settings = [{name: value for name, value in one.items() if name != "allowed_token_ids"} for one in FIXED]
    seeds = list(range(len(settings)))
    listed = [state([2, 3], **(one | {"allowed_token_ids": ALLOWED})) for one in settings]
    masked = [state([2, 3], **one) for one in settings]
    for each in masked:
        each.constraint = Listed(tuple(ALLOWED))
    free = state([2, 3], seed=9)
    expected = generate([*listed, state([2, 3], seed=9)], [*seeds, 77], engine_seed=1, device=device)
    assert generate([*masked, free], [*seeds, 77], engine_seed=1, device=device) == expected
    assert all(set(tokens) <= set(ALLOWED) for tokens in expected[:-1])


def test_an_error_ends_its_own_row_only() -> None:
    states = [state(temperature=0) for _ in range(4)]
    for row, constraint in enumerate([Listed((7,)), Listed((7,), "too deep"), Listed(())]):
        states[row].constraint = constraint
    logits = random_logits(4, VOCAB)
    output = Sampler(0)(logits, states)
    assert output.token_ids[0] == 7 and output.token_ids[3] == logits[3].argmax()
    assert output.errors[1] == "too deep" and "no token is left" in output.errors[2] and len(output.errors) == 2


def test_a_constrained_row_follows_tokens_and_hands_its_constraint_on() -> None:
    one: Any = state(temperature=0)
    one.constraint = replace(Listed((1, 2)), error="x")
    assert one.follows_tokens and one.changes_logits and not one.plain
    assert one.after([4]).constraint == one.constraint and one.after([4]).output_token_ids == [4]
