"""Logits of the tokens that packed masks allow."""

from __future__ import annotations

import torch

BITS = 32  # of a word of a mask


def words_for(vocab_size: int) -> int:
    """Return how many words a mask of so many tokens has."""
    return -(-vocab_size // BITS)


def keep_allowed(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Set the logits [rows, vocabulary] of tokens that a mask forbids to -inf, in place.

    rows [n] int64 names the rows that have a mask; words [n, words_for(vocabulary)] int32, on the logits' device: token
    t is allowed if bit t % 32 of word t // 32 is set.
    """
    shifts = torch.arange(BITS, dtype=torch.int32, device=words.device)
    forbidden = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(1).eq(0).flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(logits):  # each row has a mask: nothing need be copied
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
