"""The sampler: from logits to next tokens, for a batch of sequences with settings of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.layers.logprobs import PendingLogprobs, start_logprobs
from vllm_blend.layers.sampling_batch import SamplingBatch
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.ops.host_copy import HostCopy, to_device
from vllm_blend.ops.sampling import BROKEN, NONE_LEFT
from vllm_blend.outputs import Logprob

NO_TOKEN_LEFT = (
    "no token is left to choose from: structured_outputs, logits_processors, allowed_token_ids, bad_words and "
    "min_tokens together exclude all"
)
_ERRORS = {
    BROKEN: "the model's logits are NaN or infinite, so no token can be chosen: check the weights, the dtype "
    "and any KV cache that was loaded",
    NONE_LEFT: NO_TOKEN_LEFT,
}


@dataclass(frozen=True)
class SamplerOutput:
    """A token per row. Rows in `errors` have no valid token and no log-probabilities."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, str]


class PendingSample:
    """Tokens that have been drawn, or will be when the device gets there.

    `tokens` [rows] int64 is on the device, negative for rows without a token: the next step may be queued from it.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        logprob_rows: Sequence[int],
        logprobs: PendingLogprobs | None,
        errors: dict[int, str],
    ) -> None:
        self.tokens, self._errors = tokens, errors  # row -> what is known to be wrong with it already
        self._copy = HostCopy(tokens)
        self._logprob_rows, self._logprobs = logprob_rows, logprobs

    def result(self) -> SamplerOutput:
        """Wait for the tokens and return them."""
        return self._output

    @cached_property
    def _output(self) -> SamplerOutput:
        token_ids = self._copy.wait().tolist()
        errors = {}
        if min(token_ids, default=0) < 0:
            errors = {row: _ERRORS[token] for row, token in enumerate(token_ids) if token < 0}
        errors |= self._errors
        logprobs: list[dict[int, Logprob] | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            for row, entry in zip(self._logprob_rows, self._logprobs.result(), strict=True):
                logprobs[row] = None if row in errors else entry
        return SamplerOutput(token_ids, logprobs, errors)


class Sampler(nn.Module):
    """Chooses the next token of every sequence. A greedy or seeded row never depends on the rest of the batch.

    Rows without a seed draw from one generator made from `seed`, in the order of steps and of the rows in each. Draws
    are made on the host when a step is started.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._batch: SamplingBatch | None = None

    def forward(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """Call `start` and wait for the result."""
        return self.start(logits, states).result()

    @torch.inference_mode()
    def start(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> PendingSample:
        """Begin to choose a token for each row of logits [rows, vocabulary], which stay as they are.

        On a GPU everything is queued on the current stream and the host waits for nothing; the logits may be bf16 or
        fp16 there, and the choice is exactly that of the same logits in float32. Settings that change logits read the
        states' outputs now (see `SamplingState.follows_tokens`). Raises ValueError if rows and states differ in number;
        a row whose logits allow no choice is reported in the result's `errors` and disturbs no other. If anything else
        is raised, seeded sequences have not drawn.
        """
        if logits.shape[0] != len(states):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(states)} states: give one state per row")
        batch = self._batch_of(states, logits)
        uniforms = batch.draw_uniforms(self._generator)
        try:
            return _choose(logits, batch, uniforms)
        except BaseException:
            batch.take_back_uniforms()
            raise

    def _batch_of(self, states: Sequence[SamplingState], logits: torch.Tensor) -> SamplingBatch:
        vocab_size, device = logits.shape[-1], logits.device
        if self._batch is None or not self._batch.serves(states, vocab_size, device):
            self._batch = SamplingBatch(states, vocab_size, device)
        return self._batch


def _choose(logits: torch.Tensor, batch: SamplingBatch, uniforms: torch.Tensor | None) -> PendingSample:
    """Begin to choose tokens by the random numbers of `SamplingBatch.draw_uniforms`."""
    tokens = ops.sample_tokens(logits, batch.settings, uniforms)
    errors: dict[int, str] = {}
    for changed in batch.changed:
        own = logits[changed.rows].float()
        found = changed.processing.apply(own)
        errors |= {changed.numbers[row]: text for row, text in found.items()}
        ops.resample_tokens(tokens, changed.rows, own, changed.settings, uniforms)
    return PendingSample(tokens, list(batch.logprobs), _start_logprobs(logits, tokens, batch.logprobs), errors)


def _start_logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: dict[int, int]) -> PendingLogprobs | None:
    """Begin to compute the log-probabilities of some rows. `counts`: row -> number of most likely tokens."""
    if not counts:
        return None
    tokens = tokens.clamp(min=0)  # a row without a token gets no entry in the end
    if len(counts) < len(tokens):
        rows = to_device(torch.tensor(list(counts)), logits.device)
        logits, tokens = logits[rows], tokens[rows]
    return start_logprobs(logits, tokens, list(counts.values()))
