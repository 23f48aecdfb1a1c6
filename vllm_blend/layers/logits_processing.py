"""Changes to logits that depend on a sequence: the user's functions, masks, allowed tokens, biases, bans, penalties.

All but the functions and the masks touch few (row, token) pairs, so they are gathered, changed and scattered back for
the whole batch at once; nothing of the vocabulary's size is built per sequence, but for a mask's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_blend import ops
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.logits_process import run_processors
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.penalties import PenaltyTable
from vllm_blend.ops.token_masks import words_for


class LogitsProcessing:
    """What the settings of a batch's sequences change in their logits. Made once for as long as the batch stays the
    same, so that a step costs nothing for settings that no sequence has."""

    def __init__(self, states: Sequence[SamplingState], device: torch.device) -> None:
        self._states, self._device = list(states), device
        rows = list(enumerate(states))
        self._with_functions = [(row, state) for row, state in rows if state.params.logits_processors]
        self._constrained = [(row, state.constraint) for row, state in rows if state.constraint is not None]
        allowed = [(row, state.lists.allowed) for row, state in rows if state.lists.allowed is not None]
        biased = [(row, *state.lists.bias) for row, state in rows if state.lists.bias is not None]
        always_banned = [(row, ids) for row, state in rows if len(ids := state.lists.always_banned)]
        self._allowed = _Pairs.of(allowed, device) if allowed else None
        self._biased: tuple[_Pairs, torch.Tensor] | None = None
        if biased:
            amounts = to_device(np.concatenate([amounts for *_, amounts in biased]), device)
            self._biased = _Pairs.of([(row, ids) for row, ids, _ in biased], device), amounts
        self._always_banned = _Pairs.of(always_banned, device) if always_banned else None
        self._banning = [(row, state) for row, state in rows if state.bad_words or state.params.min_tokens]
        self._penalized = [(row, state) for row, state in rows if state.penalized]
        self._penalties = np.array([state.penalties for state in states], dtype=np.float32).reshape(-1, 3).T

    def apply(self, logits: torch.Tensor) -> dict[int, str]:
        """Apply every sequence's settings to its row of logits [rows, vocabulary] float32, in place.

        The order is: the user's functions, masks of constraints, allowed tokens, biases, bans (`min_tokens`, bad
        words), penalties. Returns the errors of functions and constraints by row; such a row has no meaning, and the
        others are right.
        """
        errors = self._run_functions(logits) | self._constrain(logits)
        self._keep_allowed(logits)
        self._add_bias(logits)
        self._ban(logits)
        self._penalize(logits)
        return errors

    def _run_functions(self, logits: torch.Tensor) -> dict[int, str]:
        errors = {}
        for row, state in self._with_functions:
            functions = state.params.logits_processors or ()
            given = (functions, state.prompt_token_ids, state.output_token_ids)
            try:
                logits[row] = run_processors(*given, logits[row].clone())
            except RuntimeError as error:
                errors[row] = str(error)
        return errors

    def _constrain(self, logits: torch.Tensor) -> dict[int, str]:
        if not self._constrained:
            return {}
        words = np.full((len(self._constrained), words_for(logits.shape[-1])), -1, dtype=np.int32)
        constraints = [constraint for _, constraint in self._constrained]
        errors = constraints[0].fill_masks(constraints, words)
        rows = np.array([row for row, _ in self._constrained], dtype=np.int64)
        ops.keep_allowed(logits, to_device(rows, self._device), to_device(words, self._device))
        return {int(rows[index]): error for index, error in errors.items()}

    def _keep_allowed(self, logits: torch.Tensor) -> None:
        if self._allowed is None:
            return
        rows, tokens = self._allowed.rows, self._allowed.tokens
        kept = logits[rows, tokens]
        logits.index_fill_(0, self._allowed.distinct_rows, -torch.inf)
        logits[rows, tokens] = kept

    def _add_bias(self, logits: torch.Tensor) -> None:
        if self._biased is not None:
            pairs, amounts = self._biased
            logits[pairs.rows, pairs.tokens] += amounts

    def _ban(self, logits: torch.Tensor) -> None:
        vocab_size = logits.shape[-1]
        pairs = [] if self._always_banned is None else [self._always_banned]
        banned = [(row, [i for i in state.banned_ids() if i < vocab_size]) for row, state in self._banning]
        now = [(row, np.array(ids, dtype=np.int64)) for row, ids in banned if ids]
        if now:
            pairs.append(_Pairs.of(now, self._device))
        for each in pairs:
            # a Python number would be copied from the host, and wait
            logits[each.rows, each.tokens] = logits.new_full((), -torch.inf)

    def _penalize(self, logits: torch.Tensor) -> None:
        if not self._penalized:
            return
        tables: list[PenaltyTable | None] = [None] * len(self._states)
        for row, state in self._penalized:
            tables[row] = state.penalty_table()
        ops.penalize(logits, tables, self._penalties)


def process_logits(logits: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, str]:
    """Apply every sequence's settings to its row of logits once; see `LogitsProcessing.apply`."""
    return LogitsProcessing(states, logits.device).apply(logits)


@dataclass(frozen=True)
class _Pairs:
    """Tokens of rows of logits: the row and the token of every pair, int64 [pairs], and each row once."""

    rows: torch.Tensor
    tokens: torch.Tensor
    distinct_rows: torch.Tensor

    @classmethod
    def of(cls, tokens: Sequence[tuple[int, NDArray[np.int64]]], device: torch.device) -> _Pairs:
        """Return the pairs of (row, its tokens), moved in one transfer."""
        numbers = np.array([row for row, _ in tokens], dtype=np.int64)
        rows, ids = np.repeat(numbers, [len(ids) for _, ids in tokens]), np.concatenate([ids for _, ids in tokens])
        moved = to_device(np.concatenate([rows, ids, numbers]), device)
        return cls(moved[: len(rows)], moved[len(rows) : 2 * len(rows)], moved[2 * len(rows) :])
