"""What a selector is: one method that scores context tokens; the best `ratio` of them are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import torch

from vllm_blend.ops.deviation import squared_distance

Reduction = Literal["mean", "max"]


class LooksAt(Enum):
    """What a selector has to see, which decides when the tokens are chosen and what choosing costs."""

    POSITIONS = "positions"  # nothing computed: the forward starts with the final token set
    QUESTION = "question"  # a pass of the suffix alone over the reused cache, then the same
    LAYERS = "layers"  # the whole context is computed up to a check layer, where the token set shrinks
    QUESTION_AND_LAYERS = "question and layers"  # both of these, and pays for both

    @property
    def asks(self) -> bool:
        """Whether the question looks first."""
        return self in (LooksAt.QUESTION, LooksAt.QUESTION_AND_LAYERS)

    @property
    def checks(self) -> bool:
        """Whether the token set shrinks at check layers."""
        return self in (LooksAt.LAYERS, LooksAt.QUESTION_AND_LAYERS)


@dataclass(frozen=True)
class Look:
    """How the question looks at the reused cache: on the layers `first` .. `stop` - 1, with its last `tokens` tokens
    (None: all), and what becomes of many probabilities for a key: over tokens, then over heads, then over layers.

    Only the plain way has kernels; any other makes the matrix of probabilities of each layer, in float32.
    """

    stop: int
    first: int = 0
    tokens: int | None = None
    over_tokens: Reduction = "mean"  # a sum, in fact: the number of tokens is the same for all keys
    over_heads: Reduction = "mean"
    over_layers: Reduction = "mean"

    @property
    def is_plain(self) -> bool:
        """Whether means are all there is to it."""
        return (self.over_tokens, self.over_heads, self.over_layers) == ("mean", "mean", "mean")


@dataclass(frozen=True)
class Evidence:
    """What a selector may look at, for the n candidate tokens of one request. Never anything of another request.

    Candidates are the reused tokens before the suffix whose KV is not known to be exact.
    """

    positions: torch.Tensor  # [n] int64, ascending
    chunk_offsets: torch.Tensor  # [n] int64, how far into its chunk each token is
    seed: int  # of the context's tokens: the same context gives the same random choice, whatever is asked
    question_mass: torch.Tensor | None = None  # [n] float32, where `LooksAt.asks`
    k_new: torch.Tensor | None = None  # [n, kv_heads, head_dim] each, where `LooksAt.checks`; K is rotated in both
    k_old: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    v_old: torch.Tensor | None = None

    def k_deviation(self) -> torch.Tensor:
        """[n] float32: squared distance between each candidate's fresh and reused K, with LooksAt.LAYERS."""
        if self.k_new is None or self.k_old is None:
            raise ValueError(f"K is compared at check layers only: the selector's looks_at must be {LooksAt.LAYERS}")
        return squared_distance(self.k_new, self.k_old)

    def v_deviation(self) -> torch.Tensor:
        """[n] float32: the same of V."""
        if self.v_new is None or self.v_old is None:
            raise ValueError(f"V is compared at check layers only: the selector's looks_at must be {LooksAt.LAYERS}")
        return squared_distance(self.v_new, self.v_old)


class Selector(ABC):
    """Base of all selectors. A subclass is a dataclass (its fields are its settings) with a `name` and a `score`."""

    name: ClassVar[str]
    looks_at: ClassVar[LooksAt] = LooksAt.POSITIONS
    default_ratio: ClassVar[float] = 0.15
    fixed_ratio: ClassVar[float | None] = None  # set where the rule itself decides how much is computed

    @abstractmethod
    def score(self, evidence: Evidence) -> torch.Tensor:
        """[n] float scores, larger meaning compute this token again. Ties go to the earlier position."""

    def question_layers(self, num_layers: int) -> int:
        """With LooksAt.QUESTION: on how many of the model's layers, the first ones, the question is let look."""
        return num_layers

    def look(self, num_layers: int) -> Look:
        """With LooksAt.QUESTION: how the question looks."""
        return Look(self.question_layers(num_layers))

    def first_share(self) -> float:
        """With LooksAt.QUESTION: the share of the budget that is chosen, and computed, before the question looks again
        and all of it is chosen; 0 where one look is enough."""
        return 0.0

    def mean_shift(self) -> float:
        """How much of the mean change of a chunk's recomputed tokens is added to its other tokens; 0 for nothing."""
        return 0.0

    def temperature(self) -> float:
        """What the scores of tokens that are not recomputed are divided by; 0 for nothing."""
        return 0.0

    def count(self, scores: torch.Tensor, evidence: Evidence, budget: int) -> int:
        """How many candidates are chosen, at most `budget`."""
        return budget

    def shares(self, ratio: float, check_layers: Sequence[int]) -> list[float]:
        """The share of context tokens kept after each check layer; the last is `ratio`."""
        return [ratio] * len(check_layers)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest scores, ascending. Stable: equal scores are taken from the front."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values


def choose(selector: Selector, evidence: Evidence, count: int) -> torch.Tensor:
    """Indices of the `count` candidates that `selector` scores best, ascending.

    Raises whatever its `score` raises, and TypeError or ValueError where that returns anything but a score for each
    candidate.
    """
    scores = selector.score(evidence)
    n = len(evidence.positions)
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"score() must return a tensor [{n}], not {type(scores).__name__}")
    if scores.shape != (n,):
        raise ValueError(f"score() must return one score for each of the {n} candidates, not {list(scores.shape)}")
    if scores.device != evidence.positions.device:
        raise ValueError(f"score() must return scores on {evidence.positions.device}, not on {scores.device}")
    return best(scores, min(count, selector.count(scores, evidence, count)))
