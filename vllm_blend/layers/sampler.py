"""From logits to next tokens, for a batch of sequences with settings of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vllm_blend.layers.logits_processing import process_logits
from vllm_blend.layers.logprobs import MAX_ELEMENTS_AT_ONCE, gather_logprobs, prompt_logprobs
from vllm_blend.layers.sampling_state import SamplingState, check_stop
from vllm_blend.layers.token_draw import draw_tokens
from vllm_blend.outputs import Logprob

__all__ = ["Sampler", "SamplerOutput", "SamplingState", "check_stop", "prompt_logprobs"]

_BROKEN_LOGITS, _NOTHING_LEFT = -1, -2
_ERRORS = {
    _BROKEN_LOGITS: "the model's logits are NaN or infinite, so no token can be chosen: check the weights, the dtype "
    "and any KV cache that was loaded",
    _NOTHING_LEFT: "no token is left to choose from: allowed_token_ids, bad_words and min_tokens together exclude all",
}


@dataclass(frozen=True)
class SamplerOutput:
    """One entry per row. Rows in `errors` have a negative token id and no log-probabilities."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, str]


@dataclass(frozen=True)
class PendingSample:
    """Tokens that have been drawn, or will be when the device gets there."""

    tokens: torch.Tensor  # [rows] int64 on the device, negative for rows without a token
    output: SamplerOutput

    def result(self) -> SamplerOutput:
        """The tokens on the host; waits for them."""
        return self.output


class Sampler(nn.Module):
    """Chooses the next token of every sequence. A greedy or seeded row never depends on the rest of the batch.

    Rows without a seed draw from one generator made from `seed`. Draws are made on the host.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def start(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> PendingSample:
        output = self(logits, states)
        return PendingSample(torch.tensor(output.token_ids, device=logits.device), output)

    @torch.inference_mode()
    def forward(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """logits [rows, vocabulary] float32, left as they are, and a state per row -> tokens and log-probabilities.

        Reads the device once, and a second time if a row wants log-probabilities. Raises ValueError if rows and states
        differ in number; a row whose logits allow no choice is reported in `errors` and disturbs no other.
        """
        if logits.shape[0] != len(states):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(states)} states: give one state per row")
        best = logits.max(dim=-1)  # NaN and +inf win, so the maximum tells whether the row is usable
        tokens = torch.where(best.values.isfinite(), best.indices, _BROKEN_LOGITS)
        complex_rows = [row for row, state in enumerate(states) if not state.argmax_only]
        for group in _groups(complex_rows, logits.shape[-1]):
            rows = _index(group, logits.device)
            chosen = self._choose(logits[rows], [states[row] for row in group])
            tokens[rows] = torch.where(tokens[rows] == _BROKEN_LOGITS, _BROKEN_LOGITS, chosen)
        token_ids = tokens.tolist()
        errors = {row: _ERRORS[token] for row, token in enumerate(token_ids) if token < 0}
        return SamplerOutput(token_ids, self._logprobs(logits, tokens, states, errors), errors)

    def _choose(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        """Tokens [rows] of sequences with any settings; `logits` is a copy and gets changed."""
        process_logits(logits, states)
        best = logits.max(dim=-1)
        chosen = best.indices
        random = [row for row, state in enumerate(states) if not state.params.greedy]
        if random:
            uniforms = self._uniforms([states[row] for row in random])
            rows = _index(random, logits.device)
            chosen[rows] = draw_tokens(logits[rows], [states[row].params for row in random], uniforms)
        return torch.where(best.values.isfinite(), chosen, _NOTHING_LEFT)

    def _uniforms(self, states: Sequence[SamplingState]) -> torch.Tensor:
        """A number in [0, 1) per sequence, float64 on the host, from the sequence's generator or else the engine's."""
        shared = sum(state.generator is None for state in states)
        uniforms = iter(torch.rand(shared, dtype=torch.float64, generator=self._generator).tolist())
        return torch.tensor(
            [_uniform(s.generator) if s.generator else next(uniforms) for s in states], dtype=torch.float64
        )

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, states: Sequence[SamplingState], errors: dict[int, str]
    ) -> list[dict[int, Logprob] | None]:
        entries: list[dict[int, Logprob] | None] = [None] * len(states)
        counts = {row: state.params.logprobs for row, state in enumerate(states) if row not in errors}
        wanted = {row: count for row, count in counts.items() if count is not None}
        if wanted:
            rows = _index(list(wanted), logits.device)
            gathered = gather_logprobs(logits[rows], tokens[rows], list(wanted.values()))
            for row, entry in zip(wanted, gathered, strict=True):
                entries[row] = entry
        return entries


def _uniform(generator: torch.Generator) -> float:
    return torch.rand((), dtype=torch.float64, generator=generator).item()


def _groups(rows: list[int], vocab_size: int) -> Iterator[list[int]]:
    """`rows` in groups whose logits stay below the bound on temporary memory."""
    step = max(1, MAX_ELEMENTS_AT_ONCE // vocab_size)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _index(rows: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
