"""Ask what the last token would have looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from vllm_blend.features.offload.predictors.base import PromotionEvidence, PromotionPredictor


@dataclass(frozen=True)
class QueryDigest(PromotionPredictor):
    """Attention that the previous step's query would pay to each chunk, estimated from digests of its blocks:
    neighbouring tokens look at much the same. In the manner of Quest (Tang et al., arXiv:2406.10774, section 3.3) with
    digests that rotate; `decay` smooths the scores over steps, as one token is a noisy witness.
    """

    name: ClassVar[str] = "query_digest"
    uses_queries: ClassVar[bool] = True

    decay: float = 0.5

    def score(self, evidence: PromotionEvidence) -> torch.Tensor:
        assert evidence.expected_mass is not None
        now, previous = evidence.expected_mass[-1], evidence.previous
        return now if previous is None else self.decay * previous + (1 - self.decay) * now
