"""Changes to logits that depend on a sequence: the user's functions, masks, allowed tokens, biases, bans, penalties.

All but the functions and the masks touch few (row, token) pairs, so they are gathered, changed and scattered back for
the whole batch at once; nothing of the vocabulary's size is built per sequence, but for a mask's bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_blend import ops
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.logits_process import run_processors
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.token_masks import words_for


def process_logits(
    logits: torch.Tensor, states: Sequence[SamplingState], drawn: torch.Tensor | None = None
) -> dict[int, str]:
    """Apply every sequence's settings to its row of logits [rows, vocabulary] float32, in place.

    The order is: the user's functions, masks of constraints, allowed tokens, biases, bans (`min_tokens`, bad words),
    penalties. Tokens that the host has not read come from `drawn`, as `Sampler.start` has them. Returns the errors of
    functions and constraints by row; such a row has no meaning, and the others are right.
    """
    errors = _run_functions(logits, states) | _constrain(logits, states)
    _keep_allowed(logits, states)
    _add_bias(logits, states)
    unread = _unread_tokens(states, drawn)
    _ban(logits, states)
    if unread is not None:
        _ban_behind(logits, states, unread)
    _penalize(logits, states, unread)
    return errors


def _unread_tokens(states: Sequence[SamplingState], drawn: torch.Tensor | None) -> torch.Tensor | None:
    """Return the unread token of each sequence [rows] int64 on the device, negative for none; None if all are read."""
    rows = [state.unread_row for state in states]
    if max(rows) < 0:
        return None
    assert drawn is not None
    if rows == list(range(len(drawn))):  # the usual case where all requests of a batch have penalties
        return drawn
    sources = to_device(np.array(rows, dtype=np.int64), drawn.device)
    tokens = drawn[sources.clamp(min=0)]
    return tokens if min(rows) >= 0 else tokens.masked_fill_(sources < 0, -1)


def _run_functions(logits: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, str]:
    errors = {}
    for row, state in enumerate(states):
        if state.params.logits_processors:
            given = (state.params.logits_processors, state.prompt_token_ids, state.output_token_ids)
            try:
                logits[row] = run_processors(*given, logits[row].clone())
            except RuntimeError as error:
                errors[row] = str(error)
    return errors


def _constrain(logits: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, str]:
    constrained = [(row, state.constraint) for row, state in enumerate(states) if state.constraint is not None]
    if not constrained:
        return {}
    words = np.full((len(constrained), words_for(logits.shape[-1])), -1, dtype=np.int32)
    constraints = [constraint for _, constraint in constrained]
    errors = constraints[0].fill_masks(constraints, words)
    rows = np.array([row for row, _ in constrained], dtype=np.int64)
    ops.keep_allowed(logits, to_device(rows, logits.device), to_device(words, logits.device))
    return {int(rows[index]): error for index, error in errors.items()}


def _keep_allowed(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    allowed = [(row, state.allowed_ids) for row, state in enumerate(states) if state.allowed_ids is not None]
    if not allowed:
        return
    rows, tokens = _pairs([row for row, _ in allowed], [ids for _, ids in allowed], logits.device)
    kept = logits[rows, tokens]
    logits.index_fill_(0, to_device(np.array([row for row, _ in allowed]), logits.device), -torch.inf)
    logits[rows, tokens] = kept


def _add_bias(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    biased = [(row, *state.bias) for row, state in enumerate(states) if state.bias is not None]
    if not biased:
        return
    rows, tokens = _pairs([row for row, _, _ in biased], [ids for _, ids, _ in biased], logits.device)
    logits[rows, tokens] += to_device(np.concatenate([amounts for _, _, amounts in biased]), logits.device)


def _ban(logits: torch.Tensor, states: Sequence[SamplingState]) -> None:
    vocab_size = logits.shape[-1]
    banned = [(row, [i for i in state.banned_ids() if i < vocab_size]) for row, state in enumerate(states)]
    banned = [(row, ids) for row, ids in banned if ids]
    if not banned:
        return
    id_arrays = [np.array(ids, dtype=np.int64) for _, ids in banned]
    rows, tokens = _pairs([row for row, _ in banned], id_arrays, logits.device)
    logits[rows, tokens] = logits.new_full((), -torch.inf)  # a Python number would be copied from the host, and wait


def _ban_behind(logits: torch.Tensor, states: Sequence[SamplingState], unread: torch.Tensor) -> None:
    """Ban the ends of bad words of which the unread token is the last but one."""
    vocab_size = logits.shape[-1]
    banned = [
        (row, first, last)
        for row, state in enumerate(states)
        for first, last in state.bans_behind_unread()
        if last < vocab_size
    ]
    if not banned:
        return
    rows, firsts, lasts = to_device(np.array(banned, dtype=np.int64).T, logits.device)
    limits = torch.where(unread[rows] == firsts, -torch.inf, torch.inf).to(logits.dtype)
    # the same token may end several bad words, so it is limited by all of them
    logits.view(-1).scatter_reduce_(0, rows * vocab_size + lasts, limits, "amin")


def _penalize(logits: torch.Tensor, states: Sequence[SamplingState], unread: torch.Tensor | None) -> None:
    if not any(state.penalized for state in states):
        return
    penalties = np.ones((3, len(states)), dtype=np.float32)
    for row, state in enumerate(states):
        penalties[:, row] = state.penalties
    tables = [state.penalty_table() if state.penalized else None for state in states]
    ops.penalize(logits, tables, penalties, unread)


def _pairs(
    rows: list[int], ids: Sequence[NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and the token of every pair, both int64 [pairs], moved in one transfer."""
    flat = np.stack([np.repeat(np.array(rows, dtype=np.int64), [len(i) for i in ids]), np.concatenate(ids)])
    pairs = to_device(flat, device)
    return pairs[0], pairs[1]
