"""Look ahead with the drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.offload.predictors.base import Evidence, LooksAt, PromotionPredictor


@dataclass(frozen=True)
class DraftUnion(PromotionPredictor):
    """The most that any token would pay to a chunk, by digests: those of the previous step (with speculative decoding,
    the last token and the drafts that were right), and the drafts of the coming one. These have no queries yet, but
    where they are copied from a chunk of the prompt, the answer is reading that chunk: it gets at least `trust`.
    Without speculative decoding there is one query."""

    name: ClassVar[str] = "draft_union"
    looks_at: ClassVar[LooksAt] = LooksAt.DIGESTS

    trust: float = 0.5  # more than chunks that are not read get

    def score(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.expected_mass is not None
        scores = evidence.expected_mass.amax(0)
        if evidence.draft_source is not None:
            scores[evidence.draft_source].clamp_(min=self.trust)
        return scores
