"""What the sampler remembers of one sequence, and when the sequence ends."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_blend.layers.token_constraint import TokenConstraint
from vllm_blend.ops.penalties import PenaltyTable
from vllm_blend.sampling_params import SamplingParams

_DRAWS_AHEAD = 64
_MOST_TAKEN_BACK = 128  # more than two steps in flight draw, with the most drafts that one may have


@dataclass(eq=False)
class TokenLists:
    """The tokens that a request's settings name. All its completions share one, as lists may be as long as the
    vocabulary."""

    params: SamplingParams
    eos_token_ids: Sequence[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()

    @cached_property
    def stopping(self) -> frozenset[int]:
        return frozenset(self.eos_token_ids) | frozenset(self.params.stop_token_ids or ())

    @cached_property
    def allowed(self) -> NDArray[np.int64] | None:
        allowed = self.params.allowed_token_ids
        return None if allowed is None else np.unique(np.array(allowed, dtype=np.int64))

    @cached_property
    def bias(self) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Token ids, each once, and what is added to their logits."""
        bias = self.params.logit_bias
        if not bias:
            return None
        return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)

    @cached_property
    def always_banned(self) -> NDArray[np.int64]:
        """Bad words of one token."""
        return np.unique(np.array([word[0] for word in self.bad_words if len(word) == 1], dtype=np.int64))

    @cached_property
    def _ends_of_words(self) -> dict[tuple[int, ...], set[int]]:
        """The last tokens of longer bad words, by the tokens before them."""
        ends: dict[tuple[int, ...], set[int]] = {}
        for word in self.bad_words:
            if len(word) > 1:
                ends.setdefault(word[:-1], set()).add(word[-1])
        return ends

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({len(start) for start in self._ends_of_words})

    def banned_after(self, output: Sequence[int]) -> set[int]:
        """Return the tokens that would complete a bad word of several tokens: one look-up for each length of these."""
        banned: set[int] = set()
        for length in self._lengths:
            if length > len(output):
                break
            banned |= self._ends_of_words.get(tuple(output[-length:]), banned)
        return banned


@dataclass(eq=False)
class SamplingState:
    """One sequence as the sampler sees it.

    `output_token_ids` is the owner's list, read here and never written. `bad_words` are the token sequences that
    `SamplingParams.bind` returned. The generator draws on the host, so a seed gives the same draws on every device.
    `constraint` must not change once the state has been asked for anything.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    eos_token_ids: Sequence[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    constraint: TokenConstraint | None = None
    shared: TokenLists | None = None  # of another completion of the same request
    generator: torch.Generator | None = field(init=False, default=None)
    _table: PenaltyTable | None = field(init=False, default=None, repr=False)
    _uniforms: list[float] = field(init=False, default_factory=list, repr=False)  # drawn ahead, the next one last
    _given: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=_MOST_TAKEN_BACK), repr=False)

    def __post_init__(self) -> None:
        self.lists = self.shared or TokenLists(self.params, self.eos_token_ids, self.bad_words)
        if self.params.seed is not None:
            self.generator = torch.Generator().manual_seed(int(self.params.seed))

    @cached_property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty."""
        return self.params.repetition_penalty, self.params.frequency_penalty, self.params.presence_penalty

    @cached_property
    def penalized(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)

    @cached_property
    def _changes_logits_always(self) -> bool:
        p = self.params
        listed = p.logit_bias or p.allowed_token_ids or p.logits_processors or self.bad_words
        return self.penalized or bool(listed) or self.constraint is not None

    @property
    def awaits_min_tokens(self) -> bool:
        return len(self.output_token_ids) < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Return whether the next token is chosen from other logits than the model's, by `logits_processing`."""
        return self._changes_logits_always or self.awaits_min_tokens

    @cached_property
    def draw_settings(self) -> tuple[float, float, float, float]:
        """(temperature, log of min_p, top_k, top_p), 0 for greedy, with values that keep all where a filter is off."""
        p = self.params
        log_min_p = math.log(p.min_p) if p.min_p > 0 else -math.inf
        top_k = p.top_k if p.top_k > 0 else math.inf
        # 2: out of reach of rounding
        return 0.0 if p.greedy else p.temperature, log_min_p, top_k, p.top_p if p.top_p < 1.0 else 2.0

    @cached_property
    def plain(self) -> bool:
        """Return whether `draw_settings` are all that the choice of a token depends on."""
        p = self.params
        return not (self._changes_logits_always or p.min_tokens or self.seeded or p.logprobs is not None)

    @property
    def seeded(self) -> bool:
        return self.generator is not None

    def next_uniform(self) -> float:
        """Return the next of a seeded sequence's own random numbers, in [0, 1)."""
        if not self._uniforms:
            # many at once: the numbers are the same, and cost less
            self._uniforms += torch.rand(_DRAWS_AHEAD, dtype=torch.float64, generator=self.generator).tolist()[::-1]
        self._given.append(self._uniforms.pop())
        return self._given[-1]

    def take_back(self, count: int) -> None:
        """Undo the last `count` (up to 128) draws: a seeded sequence gets their random numbers again."""
        if self.seeded and not self.params.greedy:
            self._uniforms += [self._given.pop() for _ in range(count)]

    def after(self, token_ids: Sequence[int]) -> SamplingState:
        """Return this sequence with more tokens, or itself if they make no difference to a draw.

        Both draw from the same random numbers, in the order in which they ask.
        """
        if not token_ids or not self.follows_tokens:
            return self
        output = [*self.output_token_ids, *token_ids]
        constraint = None if self.constraint is None else self.constraint.after(token_ids)
        other = SamplingState(
            self.params, self.prompt_token_ids, output, self.eos_token_ids, self.bad_words, constraint, self.lists
        )
        other.generator, other._uniforms, other._given = self.generator, self._uniforms, self._given
        if self.penalized:
            other._table = self.penalty_table().copy()
        return other

    @cached_property
    def follows_tokens(self) -> bool:
        """Return whether a draw depends on the tokens before it in other ways than through the model's logits: the host
        must have read them."""
        p = self.params
        followed = self.penalized or self.bad_words or p.min_tokens or p.logits_processors
        return bool(followed) or self.constraint is not None

    @property
    def stopping_ids(self) -> frozenset[int]:
        """Return the tokens that `min_tokens` holds back: end of sequence and stop tokens."""
        return self.lists.stopping

    def banned_ids(self) -> set[int]:
        """Return the tokens that may not come next, besides bad words of one token: stopping ones before `min_tokens`,
        and ends of longer bad words."""
        banned = self.lists.banned_after(self.output_token_ids)
        return banned | self.stopping_ids if self.awaits_min_tokens else banned

    def penalty_table(self) -> PenaltyTable:
        """Return the tokens under a penalty."""
        if self._table is None or self._table.num_counted > len(self.output_token_ids):
            # NOTE: only the repetition penalty looks at the prompt
            self._table = PenaltyTable(self.prompt_token_ids if self.params.repetition_penalty != 1.0 else ())
        self._table.count(self.output_token_ids)
        return self._table


def check_stop(
    state: SamplingState, token_id: int, num_total_tokens: int, max_model_len: int
) -> tuple[str, int | None] | None:
    """Return (finish_reason, stop_reason) if a sequence ends with `token_id`, its last output token, otherwise None.

    `num_total_tokens` counts prompt and output. End of sequence and stop tokens end it with "stop" unless fewer than
    `min_tokens` tokens were generated; `stop_reason` is the id of a stop token, None for end of sequence. Where the
    end of sequence is text, such as a newline, a constraint may take it as text. `max_tokens` and a full context end
    it with "length". The detokenizer looks for stop strings.
    """
    params = state.params
    num_output = len(state.output_token_ids)
    if num_output >= params.min_tokens:
        ends = token_id in state.eos_token_ids and not params.ignore_eos
        if ends and (state.constraint is None or state.constraint.has_ended()):
            return "stop", None
        if token_id in (params.stop_token_ids or ()):
            return "stop", token_id
    if num_total_tokens >= max_model_len or (params.max_tokens is not None and num_output >= params.max_tokens):
        return "length", None
    return None
