"""The settings of a batch's sequences as tensors, and the random numbers of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_blend.layers.logits_processing import LogitsProcessing
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.ops.host_copy import to_device
from vllm_blend.ops.sampling import MAX_ELEMENTS_AT_ONCE, DrawSettings

GREEDY = (0.0, -float("inf"), float("inf"), 2.0)


@dataclass(frozen=True)
class ChangedRows:
    """Rows whose logits are changed before a token is chosen: few enough to copy their logits at once."""

    processing: LogitsProcessing  # of the rows' sequences
    numbers: list[int]  # of the rows
    rows: torch.Tensor  # the same, [n] int64 on the device
    settings: DrawSettings


class SamplingBatch:
    """Settings of sequences that are sampled together, made once: a step then costs no work for each of them."""

    def __init__(self, states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> None:
        self.states, self.vocab_size, self.device = list(states), vocab_size, device
        values = np.fromiter(chain.from_iterable([state.draw_settings for state in states]), np.float64).reshape(-1, 4)
        special = [row for row, state in enumerate(states) if not state.plain]
        self._bounded = [states[row] for row in special if states[row].params.min_tokens]
        self._waiting = [state.awaits_min_tokens for state in self._bounded]
        self.logprobs = {row: k for row in special if (k := states[row].params.logprobs) is not None}
        changed = [row for row in special if states[row].changes_logits]
        self.changed = [self._changed(rows, values) for rows in _groups(changed, vocab_size)]
        random = values[:, 0] > 0
        self._seeded = np.array([row for row in special if random[row] and states[row].seeded], dtype=np.int64)
        random[self._seeded] = False
        self._shared = random.nonzero()[0]
        values[changed] = GREEDY  # all that is asked of their logits as they are is whether they are finite
        self.settings = DrawSettings.make(values, vocab_size, device)

    def _changed(self, rows: list[int], values: NDArray[np.float64]) -> ChangedRows:
        own = DrawSettings.make(values[rows], self.vocab_size, self.device)
        processing = LogitsProcessing([self.states[r] for r in rows], self.device)
        return ChangedRows(processing, rows, to_device(torch.tensor(rows), self.device), own)

    def serves(self, states: Sequence[SamplingState], vocab_size: int, device: torch.device) -> bool:
        """Return whether this is the batch of these states, as they are now."""
        return (
            self.states == list(states)  # a state equals only itself
            and self.vocab_size == vocab_size
            and self.device == device
            and self._waiting == [state.awaits_min_tokens for state in self._bounded]
        )

    def draw_uniforms(self, generator: torch.Generator) -> torch.Tensor | None:
        """Draw a number in [0, 1) for each row, [rows] float64 on the device. Returns None if no row is random.

        A row's number comes from its sequence's own generator if that has a seed, otherwise from `generator`, which
        gives one number to each unseeded random row of a step, in the order of rows. Greedy rows have 0. Numbers are
        drawn on the host: a seed gives the same draws on every device.
        """
        if not len(self._shared) and not len(self._seeded):
            return None
        uniforms = torch.zeros(len(self.states), dtype=torch.float64, pin_memory=self.device.type == "cuda")
        if len(self._shared) == len(self.states):
            torch.rand(len(self.states), dtype=torch.float64, generator=generator, out=uniforms)
        else:
            numbers = uniforms.numpy()
            if len(self._shared):
                numbers[self._shared] = torch.rand(len(self._shared), dtype=torch.float64, generator=generator).numpy()
            numbers[self._seeded] = [self.states[row].next_uniform() for row in self._seeded]
        return to_device(uniforms, self.device)

    def take_back_uniforms(self) -> None:
        """Undo the last `draw_uniforms` for the sequences that have a seed."""
        for row in self._seeded:
            self.states[row].take_back(1)


def _groups(rows: list[int], vocab_size: int) -> Iterator[list[int]]:
    """Yield `rows` in groups whose logits stay below the bound on temporary memory."""
    step = max(1, MAX_ELEMENTS_AT_ONCE // vocab_size)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
