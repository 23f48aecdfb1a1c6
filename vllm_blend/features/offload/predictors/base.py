"""The base of promotion predictors: one method that scores a request's chunks by how much the next steps need them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class PromotionEvidence:
    """The evidence that a predictor may use: the n chunks of one request, and never anything of another request."""

    ranks: torch.Tensor  # [n] int64, 0 for the most relevant by what was known before the request ran
    resident: torch.Tensor  # [n] bool
    previous: torch.Tensor | None = None  # [n] float32, the scores of the step before; None at first
    # For a predictor that `uses_queries`: [rows, n] float32, see `KeyDigests.expected_mass`. There is a row for each
    # token that the step computed for the request: one, or with speculative decoding one and the drafts that were
    # right. The last row belongs to the last token.
    expected_mass: torch.Tensor | None = None


class PromotionPredictor(ABC):
    """Base of all predictors. A subclass is a dataclass (its fields are its settings) with a `name` and a `score`.

    If it `uses_queries`, the engine keeps digests of the chunks' keys and compares the last step's queries with them.
    """

    name: ClassVar[str]
    uses_queries: ClassVar[bool] = False

    @abstractmethod
    def score(self, evidence: PromotionEvidence) -> torch.Tensor:
        """Return [n] float scores: the larger, the more the next steps need the chunk."""
