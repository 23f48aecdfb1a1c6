"""Look ahead with the drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.offload.predictors.base import Evidence, LooksAt, PromotionPredictor


@dataclass(frozen=True)
class DraftUnion(PromotionPredictor):
    """The most that any query of the previous step would pay to a chunk, by digests: with speculative decoding, the
    last token's and those of the drafts behind it, which are guesses at the tokens to come. Without drafts there is
    one query."""

    name: ClassVar[str] = "draft_union"
    looks_at: ClassVar[LooksAt] = LooksAt.DIGESTS

    def score(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.expected_mass is not None
        return evidence.expected_mass.amax(0)
