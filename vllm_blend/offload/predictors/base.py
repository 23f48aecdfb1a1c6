"""What a promotion predictor is: one method that scores a request's chunks by how much the next steps need them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch


class LooksAt(Enum):
    """What a predictor has to see, which decides what is kept for it and what a step costs."""

    RANKS = "ranks"  # nothing computed
    DIGESTS = "digests"  # the last step's queries, against digests of the chunks' keys
    MASS = "mass"  # the last step's queries, against the keys themselves


@dataclass(frozen=True)
class Evidence:
    """What a predictor may look at, for the n chunks of one request. Never anything of another request.

    A step has a row per token that it computed for the request: one, or with speculative decoding the last token and
    the drafts behind it that were right; the last row is that of the last token.
    """

    ranks: torch.Tensor  # [n] int64, 0 for the most relevant by what was known before the request ran
    resident: torch.Tensor  # [n] bool
    previous: torch.Tensor | None = None  # [n] float32, the scores of the step before; None at first
    expected_mass: torch.Tensor | None = None  # [rows, n] float32, with LooksAt.DIGESTS: see KeyDigests
    received_mass: torch.Tensor | None = None  # [rows, n] float32, with LooksAt.MASS; nan for chunks out of sight
    draft_source: int | None = None  # with speculative decoding, the chunk that the next step's drafts are copied from


class PromotionPredictor(ABC):
    """Base of all predictors. A subclass is a dataclass (its fields are its settings) with a `name` and a `score`."""

    name: ClassVar[str]
    looks_at: ClassVar[LooksAt] = LooksAt.RANKS

    @abstractmethod
    def score(self, evidence: Evidence) -> torch.Tensor:
        """[n] float scores, larger meaning that the next steps need the chunk more."""
