"""Trust the retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.features.offload.predictors.base import PromotionEvidence, PromotionPredictor


@dataclass(frozen=True)
class RetrievalRank(PromotionPredictor):
    """The rank that the prompt gave its chunks (`chunk_ranking`). It never changes, so nothing moves after the first
    placement: the floor that other predictors must beat."""

    name: ClassVar[str] = "retrieval_rank"

    def score(self, evidence: PromotionEvidence) -> torch.Tensor:
        return 1.0 / (1.0 + evidence.ranks)
