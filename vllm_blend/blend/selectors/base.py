"""The base of all selectors: a method that scores context tokens. The best are recomputed, a share `ratio` of the
context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import numpy as np
import torch

from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.ops.deviation import squared_distance

Reduction = Literal["mean", "max"]


class LooksAt(Enum):
    """What a selector needs to see. It decides when the tokens are chosen, and what choosing them costs."""

    POSITIONS = "positions"  # nothing is computed first: the forward pass starts with the final token set
    QUESTION = "question"  # the suffix alone passes over the reused cache first
    LAYERS = "layers"  # the whole context is computed up to a check layer, where the token set shrinks
    QUESTION_AND_LAYERS = "question and layers"  # both, at the cost of both

    @property
    def asks(self) -> bool:
        """Return whether the question passes over the reused cache first."""
        return self in (LooksAt.QUESTION, LooksAt.QUESTION_AND_LAYERS)

    @property
    def checks(self) -> bool:
        """Return whether the token set shrinks at check layers."""
        return self in (LooksAt.LAYERS, LooksAt.QUESTION_AND_LAYERS)


@dataclass(frozen=True)
class Look:
    """How the question looks at the reused cache: on the layers `first` to `stop` - 1, with its last `tokens` tokens
    (None: all). A key's attention probabilities are reduced over tokens, then over heads, then over layers.

    Only means have kernels. Any maximum builds the whole matrix of probabilities of each layer, in float32.
    """

    stop: int
    first: int = 0
    tokens: int | None = None
    over_tokens: Reduction = "mean"  # a sum, in fact: the number of tokens is the same for all keys
    over_heads: Reduction = "mean"
    over_layers: Reduction = "mean"

    @property
    def is_plain(self) -> bool:
        """Return whether all reductions are means."""
        return (self.over_tokens, self.over_heads, self.over_layers) == ("mean", "mean", "mean")


@dataclass(frozen=True)
class Evidence:
    """What a selector may look at: the n candidates of one request, and nothing of another request.

    The candidates are the reused tokens before the suffix whose KV is not known to be exact.
    """

    positions: torch.Tensor  # [n] int64, ascending
    chunk_offsets: torch.Tensor  # [n] int64, each token's place in its chunk
    seed: int  # a digest of the context: the same context gives the same random choice, whatever is asked
    question_mass: torch.Tensor | None = None  # [n] float32, the question's attention, if `LooksAt.asks`
    k_new: torch.Tensor | None = None  # [n, kv_heads, head_dim] each, if `LooksAt.checks`; K is rotated in both
    k_old: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    v_old: torch.Tensor | None = None

    def k_deviation(self) -> torch.Tensor:
        """Return the squared distance between each candidate's fresh and reused K, [n] float32, with LooksAt.LAYERS."""
        if self.k_new is None or self.k_old is None:
            raise ValueError(f"K is compared at check layers only: the selector's looks_at must be {LooksAt.LAYERS}")
        return squared_distance(self.k_new, self.k_old)

    def v_deviation(self) -> torch.Tensor:
        """Return the same distance for V."""
        if self.v_new is None or self.v_old is None:
            raise ValueError(f"V is compared at check layers only: the selector's looks_at must be {LooksAt.LAYERS}")
        return squared_distance(self.v_new, self.v_old)


class Selector(ABC):
    """The base of all selectors. A subclass is a frozen dataclass, whose fields are its settings, with a `name` and a
    `score`. The other methods have defaults that suit most selectors."""

    name: ClassVar[str]
    looks_at: ClassVar[LooksAt] = LooksAt.POSITIONS
    default_ratio: ClassVar[float] = 0.15
    fixed_ratio: ClassVar[float | None] = None  # set if the selector itself decides how much is recomputed
    chooses_passages: ClassVar[bool] = False  # whether `choose_spans` may choose

    def choose_spans(
        self, passages: PromptPassages, cost: Callable[[Span], int], budget: int
    ) -> Sequence[Span] | np.ndarray | None:
        """Choose spans of positions by what the passages say, before anything is computed: a list of (start, stop), or
        an array of integers [n, 2].

        `cost` gives the number of candidates in a span, and `budget` is how many may be chosen: those that spans hold
        beyond that are left out, from the end of the prompt. Return None to have candidates chosen by `score`. What it
        raises, or a span that is not of the context, is an error of its own request. It is called if `chooses_passages`
        is set.
        """
        return None

    @abstractmethod
    def score(self, evidence: Evidence) -> torch.Tensor:
        """Return a score for each candidate, [n] floats; the largest are recomputed. Of equal ones, the earlier are."""

    def look(self, num_layers: int) -> Look:
        """Return how the question looks, with LooksAt.QUESTION."""
        return Look(num_layers)

    def first_share(self) -> float:
        """Return the share of the budget that is chosen and computed before the question looks a second time and the
        rest is chosen, with LooksAt.QUESTION; 0 if it looks once."""
        return 0.0

    def mean_shift(self) -> float:
        """Return how much of the mean change of a chunk's recomputed tokens is added to its other tokens."""
        return 0.0

    def passed_over_scale(self) -> float:
        """Return what the keys of passages are multiplied by of which nothing is computed, in (0, 1], if `choose_spans`
        has chosen: below 1, later tokens look at them less. Another number is an error of its own request."""
        return 1.0

    def count(self, scores: torch.Tensor, evidence: Evidence, budget: int) -> int:
        """Return how many candidates are chosen, at most `budget`."""
        return budget

    def shares(self, ratio: float, check_layers: Sequence[int]) -> list[float]:
        """Return the share of context tokens kept after each check layer; the last is `ratio`."""
        return [ratio] * len(check_layers)


def top_indices(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest scores, ascending. Of equal scores the first are taken."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def choose(selector: Selector, evidence: Evidence, count: int) -> torch.Tensor:
    """Return the indices of the `count` candidates that `selector` scores best, ascending.

    Raises what its `score` raises, and TypeError or ValueError if that does not return a score for each candidate.
    """
    scores = selector.score(evidence)
    n = len(evidence.positions)
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"score() must return a tensor [{n}], not {type(scores).__name__}")
    if scores.shape != (n,):
        raise ValueError(f"score() must return one score for each of the {n} candidates, not {list(scores.shape)}")
    if scores.device != evidence.positions.device:
        raise ValueError(f"score() must return scores on {evidence.positions.device}, not on {scores.device}")
    return top_indices(scores, min(count, selector.count(scores, evidence, count)))
