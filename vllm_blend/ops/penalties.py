"""Penalties on the logits of tokens that a sequence has had."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_blend.ops import cuda_sampling
from vllm_blend.ops.host_copy import to_device


class PenaltyTable:
    """The tokens of a sequence, each once, and how often each was generated; 0: it is in the prompt only.

    It grows with the output, and so does its copy on a GPU: a step costs the new tokens, not the whole sequence.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.num_counted = 0  # of the output
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt_token_ids))}
        self._ids = array("i", self._slots)
        self._counts = array("i", bytes(4 * len(self._slots)))
        self._copy: torch.Tensor | None = None  # [capacity, 2] int32 on a GPU
        self._address = 0  # of the copy
        self._changed: list[int] = []  # slots in which the copy is behind, some of them twice

    def __len__(self) -> int:
        return len(self._ids)

    def count(self, output_token_ids: list[int]) -> None:
        """Count the tokens generated since the last call."""
        for token in output_token_ids[self.num_counted :]:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._slots[token] = len(self._ids)
                self._ids.append(token)
                self._counts.append(0)
            self._counts[slot] += 1
            if self._copy is not None:
                self._changed.append(slot)
        self.num_counted = len(output_token_ids)

    def copy(self) -> PenaltyTable:
        """Return another table of the same sequence, to count on in. It has no copy on a GPU yet."""
        other = PenaltyTable(())
        other.num_counted, other._slots = self.num_counted, dict(self._slots)
        other._ids, other._counts = self._ids[:], self._counts[:]
        return other

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return token ids and counts."""
        return np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.float32)

    def send(self, row: int, device: torch.device, changes: list[int]) -> int:
        """Return the address of the copy on a GPU. What is to be written to it first is appended to `changes`, four
        numbers for a slot: `row`, slot, token, count. Once they are queued there, call `copy_is_made`."""
        copy, size = self._copy, len(self._ids)
        if copy is None or copy.shape[0] < size or copy.device != device:
            host = np.zeros((max(256, 2 * size), 2), np.int32)
            host[:size, 0], host[:size, 1] = self._ids, self._counts
            self._copy = copy = to_device(host, device)
            self._address = copy.data_ptr()
            self._changed.clear()
        for slot in self._changed:
            changes += (row, slot, self._ids[slot], self._counts[slot])
        return self._address

    def copy_is_made(self) -> None:
        """Note that the copy has been given all changes."""
        self._changed.clear()


def penalize(logits: torch.Tensor, tables: Sequence[PenaltyTable | None], penalties: NDArray[np.float32]) -> None:
    """Penalise logits [rows, vocabulary] float32, in place, for the tokens in each row's table (None: no penalty).

    penalties [3, rows]: repetition (CTRL, Keskar et al., 2019, section 4.1), on all tokens of the table; then OpenAI's
    frequency and presence, on those that were generated.
    """
    if cuda_sampling.accepts(logits):
        _penalize_on_gpu(logits, tables, penalties)
    else:
        penalize_reference(logits, tables, penalties)


def penalize_reference(
    logits: torch.Tensor, tables: Sequence[PenaltyTable | None], penalties: NDArray[np.float32]
) -> None:
    entries = [(row, *table.arrays()) for row, table in enumerate(tables) if table is not None]
    pairs = np.stack(
        [
            np.repeat(np.array([row for row, _, _ in entries], dtype=np.int64), [len(ids) for _, ids, _ in entries]),
            np.concatenate([ids for _, ids, _ in entries]),
        ]
    )
    rows, tokens = torch.from_numpy(pairs).to(logits.device)
    counts = torch.from_numpy(np.concatenate([counts for _, _, counts in entries])).to(logits.device)
    repetition, frequency, presence = torch.from_numpy(penalties).to(logits.device)[:, rows]
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - frequency * counts - presence * (counts > 0)


def _penalize_on_gpu(
    logits: torch.Tensor, tables: Sequence[PenaltyTable | None], penalties: NDArray[np.float32]
) -> None:
    rows, changes = len(tables), list[int]()
    addresses, sizes = [0] * rows, [0] * rows
    for row, table in enumerate(tables):
        if table is not None:
            addresses[row], sizes[row] = table.send(row, logits.device, changes), len(table)
    # in one transfer: changes [n, 4], addresses [rows, 2], sizes [rows], penalties [3, rows], each entry 4 bytes
    after = len(changes)  # the next section
    words = np.empty(after + 6 * rows, np.int32)
    words[:after] = changes
    words[after : after + 2 * rows].view(np.int64)[:] = addresses
    words[after + 2 * rows : after + 3 * rows] = sizes
    words[after + 3 * rows :].view(np.float32).reshape(3, rows)[:] = penalties
    cuda_sampling.penalize(logits, to_device(words, logits.device), len(changes) // 4)
    for table in tables:
        if table is not None:
            table.copy_is_made()
