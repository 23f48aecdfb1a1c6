"""Log-probabilities of the model's own distribution, for the tokens a user wants to see."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.ops.host_copy import HostCopy, to_device
from vllm_blend.ops.sampling import MAX_ELEMENTS_AT_ONCE
from vllm_blend.outputs import Logprob


class PendingLogprobs:
    """Entries that have been computed, or will be when the device gets there."""

    def __init__(self, pieces: Sequence[tuple[HostCopy, Sequence[int]]]) -> None:
        self._pieces = pieces  # outputs of `_pack`, and the counts of their rows

    def result(self) -> list[dict[int, Logprob]]:
        """Wait for the entries and return them, one per row."""
        return [
            _entry(row, max(counts), count)
            for copy, counts in self._pieces
            for row, count in zip(copy.wait().tolist(), counts, strict=True)
        ]


def start_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> PendingLogprobs:
    """Begin to compute the entries of rows of logits [rows, vocabulary].

    A row's entry has its token of `token_ids` [rows] int64, and as many of the most likely ones as `counts` says.
    A count of -1 means the whole vocabulary. Ranks are those of vLLM: the most likely tokens have 1, 2, ... in order,
    even if some tie; a row's own token, if it is not among them, ranks after all that are at least as likely. Texts are
    left out.
    """
    vocab_size = logits.shape[-1]
    counts = [vocab_size if k < 0 else min(k, vocab_size) for k in counts]
    step = max(1, MAX_ELEMENTS_AT_ONCE // vocab_size)
    pieces = []
    for start in range(0, len(counts), step):
        rows = slice(start, start + step)
        pieces.append((HostCopy(_pack(logits[rows], token_ids[rows], max(counts[rows]))), counts[rows]))
    return PendingLogprobs(pieces)


def prompt_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_logprobs: int) -> list[dict[int, Logprob]]:
    """Return entries for prompt tokens: row i of logits [n, vocabulary] predicts `token_ids[i]`."""
    if len(token_ids) != logits.shape[0]:
        raise ValueError(f"{len(token_ids)} token_ids for {logits.shape[0]} rows of logits: give one per row")
    tokens = to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device)
    return start_logprobs(logits, tokens, [num_logprobs] * len(token_ids)).result()


def _pack(logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> torch.Tensor:
    """Pack the token, its rank and log-probability, the most likely tokens and theirs: [rows, 3 + 2 * width]."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs >= own).sum(-1)
    top_values, top_ids = logprobs.topk(width, dim=-1)
    # float64 holds ids, ranks and float32 values exactly: one transfer for everything
    columns = (token_ids.unsqueeze(1), ranks.unsqueeze(1), own, top_ids, top_values)
    return torch.cat([column.double() for column in columns], dim=1)


def _entry(row: list[float], width: int, count: int) -> dict[int, Logprob]:
    """Return the entry of a row that `_pack` made: its own token comes first, with its place among the most likely ones
    if it is one of them."""
    entry = {int(row[0]): Logprob(row[2], int(row[1]))}
    for position in range(count):
        entry[int(row[3 + position])] = Logprob(row[3 + width + position], position + 1)
    return entry
