"""The base of all selectors: a method that scores context tokens. The best are recomputed, a share `ratio` of the
context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from vllm_blend.ops.deviation import squared_distance


class LooksAt(Enum):
    """What a selector needs to see. It decides when the tokens are chosen, and what choosing them costs."""

    POSITIONS = "positions"  # nothing is computed first: the forward pass starts with the final token set
    QUESTION = "question"  # the suffix alone passes over the reused cache first
    LAYERS = "layers"  # the whole context is computed up to a check layer, where the token set shrinks


@dataclass(frozen=True)
class Look:
    """The layers on which the question looks at the reused cache: `first` to `stop` - 1."""

    stop: int
    first: int = 0


@dataclass(frozen=True)
class Evidence:
    """What a selector may look at: the n candidates of one request, and nothing of another request.

    The candidates are the reused tokens before the suffix whose KV is not known to be exact.
    """

    positions: torch.Tensor  # [n] int64, ascending
    chunk_offsets: torch.Tensor  # [n] int64, each token's place in its chunk
    seed: int  # a digest of the context: the same context gives the same random choice, whatever is asked
    question_mass: torch.Tensor | None = None  # [n] float32, the question's attention, with LooksAt.QUESTION
    k_new: torch.Tensor | None = None  # [n, kv_heads, head_dim] each, with LooksAt.LAYERS; K is rotated in both
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
    `score`. The other members have defaults that suit most selectors.

    `mean_shift` is how much of the mean change of a chunk's recomputed tokens is added to its other tokens, from 0 to
    1. A selector has it as a setting, a class attribute or a property.
    """

    name: ClassVar[str]
    looks_at: ClassVar[LooksAt] = LooksAt.POSITIONS
    default_ratio: ClassVar[float] = 0.15
    fixed_ratio: ClassVar[float | None] = None  # set if the selector itself decides how much is recomputed
    mean_shift: float = 0.0

    @abstractmethod
    def score(self, evidence: Evidence) -> torch.Tensor:
        """Return a score for each candidate, [n] floats; the largest are recomputed. Of equal ones, the earlier are."""

    def look(self, num_layers: int) -> Look:
        """Return the layers on which the question looks, with LooksAt.QUESTION."""
        return Look(num_layers)


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
    return top_indices(scores, count)
